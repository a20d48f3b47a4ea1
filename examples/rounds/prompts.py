"""Write prompts with checkable instructions: python prompts.py 500 1 > prompts.jsonl"""

import json
import random
import sys

from rule import BULLETS, LOWER, SHORT, WORD

QUESTIONS = (
    "Tell me about {}.", "What should I know about {}?", "Why do people like {}?",
    "How would you explain {} to a child?", "Give me advice about {}.",
    "What is surprising about {}?", "Write a few sentences about {}.",
)  # fmt: skip
TOPICS = (
    "bread", "the moon", "bicycles", "tea", "winter", "bees", "rivers", "chess", "trains", "gardens",
    "books", "clouds", "dogs", "music", "bridges", "coffee", "islands", "maps", "rain", "schools",
    "glass", "football", "salt", "mountains", "clocks", "cats", "forests", "letters", "boats", "rice",
)  # fmt: skip
WORDS = ("also", "often", "small", "people", "time", "good", "water", "find", "always", "because")


def prompt(draw):
    """Return a question with one or two instructions."""
    kinds = [LOWER, SHORT, BULLETS, WORD.format(draw.choice(WORDS))]
    instructions = draw.sample(kinds, draw.choice((1, 2)))
    return " ".join([draw.choice(QUESTIONS).format(draw.choice(TOPICS)), *instructions])


if __name__ == "__main__":
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    found = {}
    draw = random.Random(seed)
    while len(found) < count:
        found[prompt(draw)] = None
    for text in found:
        print(json.dumps({"prompt": text}))
