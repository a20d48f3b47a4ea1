"""Instructions that a few lines can check; score(prompt, answer) is 1 if all are followed, else 0."""

import re

LOWER = "Write only in lower case."
SHORT = "Use at most 30 words."
BULLETS = 'Give exactly two bullet points, each on a line that begins with "- ".'
WORD = 'Use the word "{}".'


def score(prompt, answer):
    """Return 1 if the answer follows every instruction in the prompt."""
    return float(bool(answer.strip()) and all(checks(text_of(prompt), answer)))


def text_of(prompt):
    """Return the last message of a prompt, which may be text."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def checks(prompt, answer):
    """Yield whether each instruction is followed."""
    words = re.findall(r"\w+", answer)
    if LOWER in prompt:
        yield answer == answer.lower()
    if SHORT in prompt:
        yield len(words) <= 30
    if BULLETS in prompt:
        yield sum(line.startswith("- ") for line in answer.splitlines()) == 2
    for word in re.findall(WORD.format("(.+?)"), prompt):
        yield word in map(str.lower, words)
