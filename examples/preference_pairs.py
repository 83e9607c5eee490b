"""Write made-up preference pairs: the better answer ends with the prompt's last word, the worse one with another."""

import json
import random
import sys


def main() -> None:
    draw = random.Random(0)
    words = [f"w{number}" for number in range(40)]
    with open(sys.argv[1] if len(sys.argv) > 1 else "pairs.jsonl", "w", encoding="utf-8") as file:
        for _ in range(4000):
            prompt = draw.choices(words, k=draw.randrange(3, 9))
            other = draw.choice([word for word in words if word != prompt[-1]])
            same = draw.choices(words, k=draw.randrange(1, 6))
            row = {
                "prompt": " ".join(prompt) + " ",
                "chosen": " ".join([*same, prompt[-1]]),
                "rejected": " ".join([*same, other]),
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
