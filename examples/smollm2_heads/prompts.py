"""``python prompts.py OUT.jsonl [--count N]``: prompts of no benchmark, made from what every Python has.

Half are about functions of the standard library, the rest conversation, sums and structured text. The same
Python version gives the same prompts.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CODE = (
    "Complete this Python function.\n```python\n{head}\n```",
    "Explain what this Python function does, step by step.\n```python\n{whole}\n```",
    "Write unit tests with pytest for this function.\n```python\n{whole}\n```",
    "Add type hints to this function and return the whole function.\n```python\n{whole}\n```",
    "Rename the variables in this function so that they are clearer.\n```python\n{whole}\n```",
    "Is there a bug in this function? Fix it if there is and show the result.\n```python\n{whole}\n```",
    "Write a Python function called `{name}` with this description: {about}",
)
CHAT = (
    "Explain {a} to a ten-year-old.",
    "What are the advantages and disadvantages of {a}?",
    "Give me a step-by-step plan to learn more about {a}.",
    "Compare {a} with {b}.",
    "Write a short story in which {a} and {b} both matter.",
    "Write an e-mail to a colleague about {a}.",
    "Write a quiz of five questions about {a}, with answers.",
    "Summarise what a beginner should know about {a}.",
)
TOPICS = (
    "volcanoes", "coffee", "the stock market", "bicycles", "black holes", "gardening", "the Romans",
    "job interviews", "solar power", "chess", "vaccines", "the ocean", "public transport", "poetry", "taxes",
    "bread", "jazz", "electric cars", "ancient Egypt", "photos", "sleep", "football", "bees", "the moon",
    "databases", "recycling", "earthquakes", "painting", "remote work", "dinosaurs", "cheese", "libraries",
)  # fmt: skip
NAMES = ("Ana", "Ben", "Chloe", "Dan", "Eva", "Finn", "Grace", "Kim", "Noah", "Zoe")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "tickets")
SHORTEST, LONGEST = 80, 1200


def functions() -> list[tuple[str, str, str, str]]:
    """Name, head with docstring, whole source and description of functions in the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            about = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            whole = ast.get_source_segment(source, node) if about else None
            if isinstance(node, ast.FunctionDef) and about and whole and SHORTEST < len(whole) < LONGEST:
                head = "\n".join(whole.splitlines()[: (node.body[0].end_lineno or 0) - node.lineno + 1])
                found.append((node.name, head, whole, about))
    return found


def prompts() -> Iterator[tuple[str, str]]:
    """Tags and prompts, without end."""
    chance, known = random.Random(0), functions()
    while True:
        name, head, whole, about = chance.choice(known)
        yield "code", chance.choice(CODE).format(name=name, head=head, whole=whole, about=about)
        a, b = chance.sample(TOPICS, 2)
        yield "chat", chance.choice(CHAT).format(a=a, b=b)
        name, other, thing = chance.choice(NAMES), chance.choice(NAMES), chance.choice(THINGS)
        yield "code", chance.choice(CODE[:6]).format(name=name, head=head, whole=whole, about=about)
        x, y, z = chance.randint(8, 60), chance.randint(2, 40), chance.randint(2, 9)
        if chance.random() < 0.6:
            yield (
                "maths",
                (
                    f"{name} has {x} {thing} and buys {y} more, then shares them equally among {z} friends. "
                    "How many does each get, and how many are left? Show your work."
                ),
            )
        else:
            yield (
                "structured",
                (
                    "Turn these orders into a JSON list with the keys name, item, count and price: "
                    f"{name} wants {x} {thing} at {y}.50 dollars each; {other} wants {z} {thing} at "
                    f"{y + 1}.25 dollars each."
                ),
            )


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=2560)
    wanted = parser.parse_args()
    seen: set[str] = set()
    with wanted.out.open("w", encoding="utf-8") as file:
        for tag, prompt in prompts():
            if prompt not in seen:
                seen.add(prompt)
                file.write(json.dumps({"tag": tag, "prompt": prompt}) + "\n")
            if len(seen) == wanted.count:
                break


if __name__ == "__main__":
    main()
