"""Which hunks are likely to be the cause of a growth, before anything was run.

What changed the meaning of lines that did not change (how long a tensor lives, what autograd keeps,
the number format, a setting) comes before what only has bytes: those may have moved to it. Within
that, the order is of `Blame`: how near a changed line is to what grew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gpuprobe.analysis.blame.hunks import Hunk
from gpuprobe.model.place import Place

_KEEPS: Final = re.compile(
    r"\bno_grad\b|\binference_mode\b|\bset_grad_enabled\b|\.detach\w*\(|\.item\(\)|\.tolist\(\)"
    r"|\.cpu\(\)|^\s*del\b|\bautocast\b|checkpoint|\bset_to_none\b|\bzero_grad\b|\bempty_cache\b"
    r"|\bretain_graph\b|\bcreate_graph\b|\bretain_grad\b|\buse_reentrant\b|\brequires_grad\w*"
    r"|\bweakref\b|\bgc\.|\boffload\w*|\bclear\(\)|\bpop\w*\(|\bmaxlen\b|\bremove\(|\bfused\b"
    r"|\bforeach\b|\bstep\(\)|\bchunk\w*|\binplace\b|_\(|\bfloat16\b|\bbfloat16\b|\bhalf\(\)"
    r"|\bno_sync\b|\beval\(\)|\bgradient_\w+|\bremat\w*",
    re.MULTILINE,
)
"""What keeps memory low where it is: its removal shows in lines that did not change."""

_KEPT: Final = re.compile(
    r"\bretain_graph\s*=\s*True|\bcreate_graph\s*=\s*True|\.append\(|\.clone\(|\.copy\(|deepcopy"
    r"|\.float\(\)|\bfloat(?:32|64)\b|\.double\(\)|cache|\bself\.\w+\s*=|\bglobal\b|\bcat\(|\bstack\("
    r"|\brepeat\w*\(|\.expand\(|\.contiguous\(|\bregister_\w+|\bretain_grad\b|\bcopy_\b|\bEMA\b|ema"
    r"|\bamsgrad\b|\bmomentum\b|\bAdam\w*|\bhook\b|\bstore|\bhistory\b|\bqueue\b|\bdeque\b",
    re.MULTILINE,
)
"""What keeps memory alive, or makes more."""

_TALKS: Final = re.compile(r"\bprint\(|\blogg?(?:er|ing)?\.|\bwarnings?\.|\bassert\b|\"\"\"|'''")
_NUMBER: Final = re.compile(r"(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?")
_SIZES: Final = re.compile(
    r"batch|size|width|hidden|dim|layer|depth|length|seq|head|channel|token|vocab|accum|micro|worker"
    r"|buffer|prefetch|step|every|keep|window|crop|resol|image|block|expert|rank|beam|sample|num",
    re.IGNORECASE,
)
_FLAG: Final = re.compile(r"\b(?:true|false|yes|no|on|off|none|null)\b", re.IGNORECASE)
_IMPORT: Final = re.compile(r"^\s*(?:import|from)\b")


def likely_first(hunks: Sequence[Hunk], suspects: Sequence[Place]) -> list[int]:
    """The numbers of the hunks, the likeliest first. ``suspects``: the lines that explain the
    growth by their place in the program, the best first."""
    scores = []
    for hunk in hunks:
        near = (2.5 / (1 + at) for at, line in enumerate(suspects) if _is_of(line, hunk))
        scores.append(meaning(hunk) + max(near, default=0.0))
    return sorted(range(len(hunks)), key=lambda at: (-scores[at], hunks[at].file, hunks[at].start))


def _is_of(line: Place, hunk: Hunk) -> bool:
    return line.file == hunk.file and hunk.start - (not hunk.new) <= line.line <= max(
        hunk.start, hunk.end - 1
    )


def meaning(hunk: Hunk) -> float:
    """How likely a change of this kind needs memory, wherever it is: 0 to 4."""
    old, new = "".join(hunk.old), "".join(hunk.new)
    code = [text for text in (*hunk.old, *hunk.new) if text.strip()]
    if not code or all(_IMPORT.match(text) for text in code):
        return 0.0
    if hunk.whole is not None:
        return 1.0
    score = 0.5
    lost = _counts(_KEEPS, old, new)
    if lost:
        score = 3.0
    elif _counts(_KEPT, new, old):
        score = 2.0
    if not hunk.file.endswith(".py") or old.lstrip().startswith("@"):
        score = max(score, 1.5)
    if old and new:
        score = max(score, _of_values(old, new))
    if all(_TALKS.search(text) for text in code) and not lost:
        score -= 1.0
    return max(0.0, score)


def _counts(pattern: re.Pattern[str], one: str, two: str) -> bool:
    """Whether ``one`` has more of it than ``two``, or it is there in another line."""
    return len(pattern.findall(one)) > len(pattern.findall(two))


def _of_values(old: str, new: str) -> float:
    """Of a line in which values changed: numbers that rose, flags that turned."""
    one, two = _NUMBER.findall(old), _NUMBER.findall(new)
    of_size = 1.0 if _SIZES.search(new) else 0.0
    same = _NUMBER.sub("0", old).split() == _NUMBER.sub("0", new).split()
    if same and one != two:
        rose = any(float(b.replace("_", "")) > float(a.replace("_", "")) for a, b in
                   zip(one, two, strict=True))  # fmt: skip
        return (1.5 if rose else 0.8) + of_size
    if _FLAG.sub("?", old).split() == _FLAG.sub("?", new).split():
        return 2.0
    return 1.0
