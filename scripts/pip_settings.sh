#!/usr/bin/env bash
# Prints uv's form of what pip is set to use (uv does not read pip's configuration): one argument a line.
set -euo pipefail

settings() { # name='value' lines of pip's files and environment
  if command -v pip >/dev/null; then pip config list 2>/dev/null || true; fi
  env | sed -n 's/^PIP_FIND_LINKS=/find-links=/p; s/^PIP_INDEX_URL=/index-url=/p; s/^PIP_EXTRA_INDEX_URL=/extra-index-url=/p; s/^PIP_CERT=/cert=/p'
}

settings |
  sed -n "s/^\(.*\.\)\{0,1\}\(find-links\|index-url\|extra-index-url\|cert\)='\{0,1\}\([^']*\)'\{0,1\}\$/\2 \3/p" |
  while read -r name values; do
    for value in $values; do
      case $name:$value in
      find-links:*) printf '%s\n' "--find-links=$value" ;;
      index-url:http*) printf '%s\n' "--default-index=$value" ;;
      extra-index-url:http*) printf '%s\n' "--index=$value" ;;
      cert:*) printf '%s\n' --system-certs ;; # an authority of this machine's own: the system's store has it too
      esac
    done
  done | sort -u
