"""The code blocks of a Markdown page, the commands in them, and what they print."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "studies").rglob("*.md")]
)

_PROGRAMS = ("wlb", "wlb-studies", "make", "python", "pytest", "torchrun", "tensorboard", "hf", "nohup", "pip")
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->")
_ON_TWO = re.compile(r"<!-- runs on 2 processes(?: with (a stand-in for )?(?P<package>\w+))? -->")
_FILE = re.compile(r"Write this to `(?P<name>\S+)`")
_VARY = "<!-- figures vary -->"
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """One block: its language is that of its fence; of an indented one ``shell`` or, if it holds no command, ``text``.

    What the command above prints is fenced as ``output``, under a comment where its figures vary (with the machine, or
    with the files that are read). ``not_run`` is the reason in the comment above a block, ``file`` the name that the
    text above tells to save it under.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    file: str | None
    figures_vary: bool
    on_two: re.Match[str] | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Command lines, continued lines joined, without comments and output."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found: list[str] = []
        for line in lines:
            if _program(line):
                found.append(line.removeprefix("$ ").partition("  #")[0].strip())
            elif found and line.startswith(" ") and line.strip().startswith("["):
                found[-1] += " " + line.strip()  # a synopsis goes on
        return found

    def shows(self, printed: str) -> bool:
        """Whether these are the words of ``printed``, where ``...`` is any words and last digits may be off by one."""
        words = ["(?:\\S+ )*" if word == "..." else self._pattern(word) + " " for word in _words(self.text)]
        return bool(re.fullmatch("".join(words), " ".join([*_words(printed), ""])))

    def _pattern(self, word: str) -> str:
        between = [re.escape(part) for part in _NUMBER.split(word)]
        numbers = ["[\\d.,]+" if self.figures_vary else _neighbours(number) for number in _NUMBER.findall(word)]
        return "".join(text + number for text, number in zip_longest(between, numbers, fillvalue=""))


def _words(text: str) -> list[str]:
    return text.replace("─", "").split()


def _neighbours(number: str) -> str:
    """A pattern of ``number`` and of those one higher and lower in its last digit."""
    places = len(number.partition(".")[2])
    value, comma = float(number.replace(",", "")), "," * ("," in number)
    return "(?:" + "|".join(re.escape(f"{value + step / 10**places:{comma}.{places}f}") for step in (-1, 0, 1)) + ")"


def program_and_arguments(command: str) -> list[str]:
    """The words of ``command``, with the program's name without its directory."""
    words = shlex.split(command, comments=True)
    return [words[0].rpartition("/")[2], *words[1:]]


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number, above = 0, ""
    while number < len(lines):
        line = lines[number]
        if line.startswith("```"):
            stop = next(index for index in range(number + 1, len(lines)) if lines[index].startswith("```"))
            yield _block(page, number, line.removeprefix("```") or "text", lines[number + 1 : stop], above)
            number, above = stop + 1, ""
        elif line.startswith("    ") and (number == 0 or not lines[number - 1]):
            stop = number
            while stop < len(lines) and (lines[stop].startswith("    ") or not lines[stop]):
                stop += 1
            text = [inside[4:] for inside in lines[number:stop]]
            yield _block(page, number, "shell" if _program(text[0]) else "text", text, above)
            number, above = stop, ""
        else:
            above = line or above
            number += 1


def _block(page: Path, number: int, language: str, lines: list[str], above: str) -> Block:
    reason, file = _NOT_RUN.fullmatch(above), _FILE.search(above)
    text, two = "\n".join(lines).strip("\n"), _ON_TWO.fullmatch(above)
    varies = above == _VARY
    return Block(page, number + 1, language, text, reason and reason["reason"], file and file["name"], varies, two)


def _program(line: str) -> bool:
    """Whether ``line`` calls a program, whatever directory it is in."""
    first = line.removeprefix("$ ").partition(" ")[0].rpartition("/")[2]
    return first in _PROGRAMS
