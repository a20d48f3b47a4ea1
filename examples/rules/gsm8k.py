"""A rule for rows of GSM8K, whose column `answer` is the solution and ends with `#### 1,234`:

rather generate MODEL gsm8k.jsonl --out answers.jsonl
rather judge answers.jsonl --with gsm8k.py:score --column gold=answer
"""


def score(prompt, answer, gold):
    """Return whether the model's answer ends with the number of the solution."""
    return number(answer) == number(gold) != ""


def number(text):
    """Return what follows the last ####, without commas."""
    return text.rpartition("####")[2].replace(",", "").strip()
