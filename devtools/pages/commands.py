"""The reference of the command line, made of what ``--help`` prints, which tests keep word for word."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .faces import ROOT

GOLDEN = ROOT / "tests" / "cli" / "golden"
_VALUE = r"\[[^\]]*\]+[A-Z]*|\{[^}]*\}|\S+\|\S+|\S+=>\S+|[A-Z][A-Z0-9_]*(?:[=:,][A-Z.]+)*"
_OPTION = re.compile(
    rf"(?P<names>-h, --help|--[a-z][\w.-]*)(?:"
    rf"(?P<value> (?:{_VALUE})(?: [A-Z]{{2,}})*) (?P<valued>(?:[A-Z0-9\"'`(]|[\w.]+:|\w+[ ,]).*)"
    rf"| (?P<plain>(?:[A-Z]|show ).*))"
)
_ARGUMENT = re.compile(r"(?P<names>\[[A-Z]\w*[^\]]*\]|[A-Z_]{2,}) (?P<text>\S.*)")
_GROUP = re.compile(r"[a-z][\w .-]* (?:options|arguments|subcommands)|options|subcommands")


@dataclass
class _Group:
    """The lines between two headings of a help page."""

    title: str = ""
    prose: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Take one line: an option, an argument, the rest of one, or prose."""
        option = _OPTION.fullmatch(line)
        argument = _ARGUMENT.fullmatch(line) if self.title == "positional arguments" else None
        if option:
            text = option["valued"] or option["plain"]
            self.rows.append((f"{option['names']}{option['value'] or ''}", text))
        elif argument:
            self.rows.append((argument["names"], argument["text"]))
        elif self.rows:
            names, text = self.rows.pop()
            self.rows.append((names, f"{text} {line}"))
        elif self.prose and self.prose[-1].endswith("\\"):
            self.prose[-1] += f" {line}"
        else:
            self.prose.append(line)

    def draw(self) -> list[str]:
        out = [f"### {self.title.capitalize()}", ""] if self.title and (self.prose or self.rows) else []
        examples = [example for line in self.prose for example in line.split("example: ")[1:]]
        for line in self.prose:
            if words := line.split("example: ")[0].strip():
                out += [_escape(words), ""]
        if examples:
            out += ["```console", *("$ " + example.replace("\\ ", "").strip() for example in examples), "```", ""]
        if self.rows:
            out += ["| option | meaning |" if self.title != "positional arguments" else "| argument | meaning |"]
            out += ["| --- | --- |", *(f"| {_code(names)} | {_escape(text)} |" for names, text in self.rows), ""]
        return out


def commands_page(folder: Path = GOLDEN) -> str:
    """One page with a section for each command and tables of its options."""
    names = re.findall(r"^  (\w+)  +\S", (folder / "help.txt").read_text(), re.MULTILINE)
    sections = [section(f"penstock {name}", (folder / f"help-{name}.txt").read_text()) for name in names]
    sections.append(section("python -m penstock.trainer", (folder / "help-trainer.txt").read_text()))
    head = (
        "# All options of all commands\n\nThis page is made from what `--help` prints. "
        "[The command line](../cli.md) explains the commands and shows what they print.\n"
    )
    return "\n\n".join([head, *sections]) + "\n"


def section(title: str, text: str) -> str:
    """Turn what one ``--help`` prints, a line for each option, into Markdown."""
    text = re.sub(r"\(required\) (?=[A-Z]{2,} )", "(required)\n", text)  # one argument a line
    usage, *lines = [line.strip() for line in text.splitlines()]
    groups = [_Group()]
    for line in lines:
        if _GROUP.fullmatch(line):
            groups.append(_Group(title=line))
        elif line:
            groups[-1].add(line)
    body = [line for group in groups for line in group.draw()]
    return "\n".join([f"## {title}", "", "```text", usage, "```", "", *body]).rstrip()


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _escape(text: str) -> str:
    """Keep stars, underscores and angle brackets of plain text, but not those within backquotes."""
    parts = re.split(r"(``?[^`]+``?)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([|<>*_\[\]])", r"\\\1", part) for part in parts)
