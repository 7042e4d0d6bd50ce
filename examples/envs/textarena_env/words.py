"""The words that Wordle draws from, as the data that TextArena asks NLTK for: nothing is downloaded.

TextArena takes the nouns of NLTK's basic English list as secret words, and every word of NLTK's list or of its own dictionaries as a guess.
"""

from __future__ import annotations

import json
from pathlib import Path

_SECRETS = """
angle apple baker basin beach berry blade board brain bread brick bride brush cabin cable camel canal candy cargo chain chair chalk
chest child cigar clerk cliff clock cloth cloud coach coast coral crane cream crown crumb curve daisy dance diary drain dream dress
drill eagle earth fence field flame flask fleet flock flood floor flour flute forge frost fruit ghost giant glass globe glove grain
grape grass groom guest habit heart hedge honey horse hotel house jewel judge juice knife label lemon linen maple march medal metal
model money month moose motor mouse mouth music nurse ocean olive onion opera orbit organ paint panel paper peach pearl pedal phone
piano pilot plain plane plant plate point porch pound prize queen quilt radio ranch razor river robin salad scale scarf scene shade
sheep sheet shelf shell shirt shore skirt smile smoke snake spade spear spice spoon sport stage stair stamp steam steel stone stool
storm story straw sugar swamp sword table tiger toast torch tower track trail train truck trunk uncle valve video voice wagon waist
watch water whale wheat wheel widow witch woman world wrist yacht youth zebra
"""
SECRETS = tuple(_SECRETS.split())


def secrets(count: int = 0) -> tuple[str, ...]:
    """So many of the words, from all over the alphabet; 0: all."""
    return SECRETS[:: len(SECRETS) // count][:count] if count else SECRETS


def write_nltk_data(folder: Path, count: int = 0) -> None:
    """Word lists and a tagger that calls each of these words a noun, where NLTK looks for them below `folder`. `count` of the words are
    drawn; all can be guessed."""
    lists, tagger = folder / "corpora" / "words", folder / "taggers" / "averaged_perceptron_tagger_eng"
    lists.mkdir(parents=True)
    tagger.mkdir(parents=True)
    for name, words in (("en", SECRETS), ("en-basic", secrets(count))):
        (lists / name).write_text("\n".join(words) + "\n")
    parts = {"weights": {}, "tagdict": dict.fromkeys([*SECRETS, "test"], "NN"), "classes": ["NN"]}
    for part, content in parts.items():
        (tagger / f"averaged_perceptron_tagger_eng.{part}.json").write_text(json.dumps(content))
