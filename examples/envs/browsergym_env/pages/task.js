// What every page is played by: it is begun with drawn numbers, says its goal, and ends once.
"use strict";

const task = {
  draws: [],
  result: { done: false, reward: 0 },

  // The page's own part: a function that builds the page from what is drawn and returns the goal.
  define(build) {
    this.build = build;
  },

  // numbers: in [0, 1), as many as a page may draw. All that is left to chance comes from them.
  begin(numbers) {
    this.draws = [...numbers];
    return this.build();
  },

  pick(things) {
    if (!this.draws.length) throw new Error("the page draws more than it was given");
    return things[Math.floor(this.draws.shift() * things.length)];
  },

  // count different ones, in a drawn order.
  sample(things, count) {
    const left = [...things];
    return Array.from({ length: count }, () => left.splice(left.indexOf(this.pick(left)), 1)[0]);
  },

  add(tag, text, properties = {}) {
    const element = Object.assign(document.createElement(tag), properties);
    element.style.display = "block";
    element.append(text);
    document.body.append(element);
    return element;
  },

  // The first end counts; whatever is done after it does not.
  end(won) {
    if (!this.result.done) this.result = { done: true, reward: won ? 1 : 0 };
  },
};
