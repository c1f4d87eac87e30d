"""Write ``harbour_log.txt``: the text that ``train_gpt.py`` learns.

The text is made up by this script, from the phrases below and a fixed seed, so nobody else's
words are in it; it is dedicated to the public domain (CC0 1.0). It repeats itself enough for a
small model to learn something in a minute on a CPU.

    python examples/data/make_harbour_log.py
"""

from __future__ import annotations

import random
from pathlib import Path

TARGET_CHARACTERS = 64 * 1024
SEED = 20_240_501

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August")
WEATHER = (
    "Clear at dawn, with a light wind from the west.",
    "Fog until noon; the far buoy could not be seen from the steps.",
    "Rain all night and a heavy sea running past the bar.",
    "Dead calm. Smoke from the chimneys went straight up.",
    "A hard frost on the ropes, and the crane would not turn before ten.",
    "Wind backing to the south, rising after sunset.",
    "Showers with bright spells, and a double rainbow over the salt works.",
    "Low cloud, no wind worth the name, and the gulls walking about the quay.",
)
SHIPS = (
    "Marigold",
    "Patience",
    "Two Brothers",
    "Grey Heron",
    "Sea Thrift",
    "Linnet",
    "Anna Lisbet",
)
KINDS = ("the schooner", "the ketch", "the brig", "the steam barge", "the lugger", "the cutter")
PORTS = ("Northmouth", "the Sands", "Old Ferry", "Stonehithe", "the islands", "Kettle Bay")
CARGO = (
    "salt",
    "slates",
    "barley",
    "oak planks",
    "coal",
    "herring in barrels",
    "wool",
    "window glass",
)
COUNTS = ("twelve", "twenty", "thirty-one", "forty", "fifty-five", "ninety", "a hundred and six")
UNITS = ("tons", "loads", "crates", "bales")
PEOPLE = (
    "the pilot",
    "Mrs. Aldous",
    "the customs man",
    "young Peter",
    "the carpenter",
    "the smith",
)
DEEDS = (
    "painted the second mooring post",
    "counted the sacks twice and found one short",
    "asked leave to mend the lamp",
    "brought a letter that had been to three harbours before this one",
    "measured the depth at the steps and wrote it on the wall",
    "took the small boat out to look at the chain",
    "bought a rope that was longer than he needed",
    "said that the tide would be late, and was right",
)
REMARKS = (
    "Nothing was lost.",
    "The bell was rung at four, as is the rule.",
    "I have written to the office about the steps, again.",
    "The lamp burned well all night.",
    "Two hands were paid off and three taken on.",
    "The cat has had her kittens in the sail loft.",
    "No dues were collected, there being nobody to pay them.",
    "The clock was set right by the noon gun.",
)


def entry(rng: random.Random, month: str, day: int) -> str:
    """One day of the log."""
    lines = [f"{month} {day}.", rng.choice(WEATHER)]
    for _ in range(rng.randrange(1, 4)):
        ship, port = f"{rng.choice(KINDS)} {rng.choice(SHIPS)}", rng.choice(PORTS)
        load = f"{rng.choice(COUNTS)} {rng.choice(UNITS)} of {rng.choice(CARGO)}"
        form = rng.randrange(3)
        if form == 0:
            lines.append(
                f"At {rng.randrange(1, 13)} o'clock {ship} came in from {port} with {load}."
            )
        elif form == 1:
            lines.append(f"{ship[0].upper()}{ship[1:]} left for {port}, taking {load}.")
        else:
            lines.append(f"{ship[0].upper()}{ship[1:]} lay at the quay, waiting for {load}.")
    if rng.randrange(3):
        person = rng.choice(PEOPLE)
        lines.append(f"{person[0].upper()}{person[1:]} {rng.choice(DEEDS)}.")
    lines.append(rng.choice(REMARKS))
    return " ".join(lines)


def harbour_log() -> str:
    """The whole text: whole entries, until it is at least `TARGET_CHARACTERS` long."""
    rng = random.Random(SEED)
    entries: list[str] = []
    length = 0
    number = 0
    while length < TARGET_CHARACTERS:
        month, day = MONTHS[number // 28 % len(MONTHS)], number % 28 + 1
        entries.append(entry(rng, month, day))
        length += len(entries[-1]) + 2
        number += 1
    return "\n\n".join(entries) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("harbour_log.txt").write_text(harbour_log(), encoding="utf-8")
