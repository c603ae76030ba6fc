"""The documentation says what is so: its Python runs, its links lead somewhere, its lists of options are whole."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from started_process import started_process
from torchrun import run_ranks

import penstock.storage.resolve
from penstock import DistributedDataLoader, pack
from penstock.cli import COMMANDS, run
from penstock.loader import audit
from penstock.storage import MemoryStore, Store
from penstock.storage.clients.remote import RemoteStore

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.exists()]
LINKED = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
_FENCE = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Loaders of others, whose code a page shows: it runs where they are installed.
PEERS = ("datasets", "litdata", "streaming", "webdataset")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def python_blocks(text: str) -> list[tuple[int, str, str]]:
    """(first line's number, what follows the word python, the code) of each block marked ```python."""
    return [
        (text.count("\n", 0, found.start(3)), found[2].strip(), found[3])
        for found in _FENCE.finditer(text)
        if found[1] == "python"
    ]


def is_installed(peer: str) -> bool:
    return importlib.util.find_spec(peer) is not None


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.fixture(scope="module")
def object_stores() -> Iterator[None]:
    """Cloud and web URLs lead into memory, after their options were read as for the real store; and hold small data."""
    real = penstock.storage.resolve.open_client

    def open_client(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Store:
        scheme, mark, rest = os.fspath(url).partition("://")
        if not mark or scheme in ("file", "mem", "memory"):
            return real(url, storage_options)
        RemoteStore(os.fspath(url), storage_options).close()
        return MemoryStore(f"mem://docs-{scheme}-{rest}")

    patch = pytest.MonkeyPatch()
    assert penstock.storage.open_client is real  # the face keeps what it imports first
    patch.setattr(penstock.storage.resolve, "open_client", open_client)
    _make_data()
    yield
    patch.undo()


def _make_data() -> None:
    bucket = _bucket()
    for root in ("s3-public", "gs-bucket", "az-container", "https-example.org"):
        rows, options = bucket["train"]
        pack(rows, f"mem://docs-{root}/train/", **options)
    for name, (rows, options) in bucket.items():
        pack(rows, f"mem://docs-s3-bucket/{name}/", **options)


def _bucket() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """The data sets of the pages' bucket, by name: samples, and how they are packed."""
    cv2 = pytest.importorskip("cv2", reason="install penstock[images]")
    rng = np.random.default_rng(0)
    photos = [
        {
            "__key__": f"{i:06d}",
            "jpg": bytes(cv2.imencode(".jpg", rng.integers(0, 255, (40 + i % 9, 48, 3), np.uint8))[1]),
            "cls": i % 10,
        }
        for i in range(120)
    ]
    clicks = [
        {"user": i % 977, "item": i * 7 % 50021, "price": i % 100 / 4, "clicked": int(i % 9 == 0)}
        for i in range(20_000)
    ]
    tokens = [np.append(rng.integers(1, 50_000, 999), 0) for _ in range(50)]
    texts = {name: [{"text": f"{name} {i}"} for i in range(count)] for name, count in (("web", 300), ("code", 90))}
    return {
        "train": (photos, {"shard_bytes": 150_000}),
        "imagenet/train": (photos, {}),
        "clicks": (clicks, {"format": "parquet", "shard_bytes": 60_000}),
        "tokens": (tokens, {"format": "tokens", "seq_len": 100}),
        **{name: (rows, {"format": "parquet"}) for name, rows in texts.items()},
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("object_stores")
@pytest.mark.filterwarnings("ignore:unclosed file .*\\.tar:ResourceWarning")  # webdataset leaves its shards open
def test_every_python_block_of_the_documentation_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if is_installed("streaming"):  # its ready-made data sets import torchvision, which may be of another torch
        sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    _write_sources(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    for line, mark, code in python_blocks(page.read_text()):
        if mark == "no-run" or (mark.startswith("needs-") and not is_installed(mark.removeprefix("needs-"))):
            continue
        if not torch.cuda.is_available():
            code = code.replace('device="cuda"', "device=None")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n" * line + code, str(page), "exec"), names)
    for value in names.values():
        if isinstance(value, DistributedDataLoader):
            value.close()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # what a page set; monkeypatch would put it back at the end
    names.clear()
    gc.collect()


FOR_RANKS = [
    pytest.param(page, line, code, id=f"{page.relative_to(ROOT)}:{line + 1}")
    for page in PAGES
    for line, mark, code in python_blocks(page.read_text())
    if mark == "torchrun"
]


@pytest.mark.parametrize(
    "page", [ROOT / "docs" / name for name in ("start.md", "loader.md", "trainer.md", "resume.md")]
)
def test_pages_that_speak_of_torchrun_mark_the_script_for_it(page: Path) -> None:
    assert "torchrun" in [mark for _, mark, _ in python_blocks(page.read_text())]


@pytest.mark.parametrize(("page", "line", "code"), FOR_RANKS)
def test_scripts_for_ranks_run_under_torchrun(page: Path, line: int, code: str, tmp_path: Path) -> None:
    script = _script(page, line, code, tmp_path)
    done = run_ranks(2, script, timeout_s=250, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_first_pages_script_resumes_after_a_kill_on_other_ranks_and_counts_each_sample_once(
    tmp_path: Path,
) -> None:
    kill_at = 41 * 96 + 5 * 96  # in the second epoch
    page = ROOT / "docs" / "start.md"
    [(line, code)] = [(line, code) for line, mark, code in python_blocks(page.read_text()) if mark == "torchrun"]
    script = _script(page, line, code, tmp_path)
    slow = script.with_name("slow.py")  # the same script, which the test can catch in mid-epoch
    slow.write_text(script.read_text().replace("step += 1", "step += 1; import time; time.sleep(0.06)"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(slow)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with started_process(launcher, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as ranks:
        while _reached(tmp_path / "ranks.pt") < kill_at:
            assert ranks.poll() is None, "the ranks ended before they were to be killed"
            time.sleep(0.01)
    assert kill_at <= _reached(tmp_path / "ranks.pt") < 2 * 41 * 96
    done = run_ranks(3, script, timeout_s=250, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = audit(tmp_path / "audit-ranks")
    assert report.is_exact, report
    assert [epoch.delivered for epoch in report.epochs] == [41 * 96] * 2


def _script(page: Path, line: int, code: str, folder: Path) -> Path:
    """A page's script as a file, with the data that the page made before it, or that lie in its bucket."""
    script = folder / "train.py"
    script.write_text(code.replace("s3://bucket/", f"{folder}/bucket/"))
    before = [(at, made) for at, mark, made in python_blocks(page.read_text()) if at < line and "pack(" in made]
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for at, made in before:
            exec(compile("\n" * at + made, str(page), "exec"), {"__name__": "example"})
    if "s3://bucket/" in code:
        for name, (rows, options) in _bucket().items():
            pack(rows, folder / "bucket" / name, **options)
    return script


def _reached(saved: Path) -> int:
    """The samples of all epochs up to the checkpoint that lies there; 0 without one."""
    if not saved.exists():
        return 0
    state = torch.load(saved)["loader"]
    return int(state["epoch"] * 41 * 96 + state["consumed"])


def _write_sources(folder: Path) -> None:
    """What the examples pack."""
    for kind in ("ants", "bees"):
        (folder / "photos" / kind).mkdir(parents=True)
        for i in range(3):
            (folder / "photos" / kind / f"{i}.txt").write_text(f"{kind} {i}")
    (folder / "clicks.csv").write_text("user,price\n" + "".join(f"{i},{i / 4}\n" for i in range(50)))
    lines = [json.dumps({"text": f"document {i} of a small corpus"}) for i in range(50)]
    (folder / "docs.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_says_why(page: Path) -> None:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        if found[1] == "python":
            assert re.fullmatch(rf"|no-run|torchrun|needs-(?:{'|'.join(PEERS)})", found[2].strip()), found[0]
        if found[1] == "python" and found[2].strip() == "no-run":
            before = text[: found.start()].rstrip().rpartition("\n")[2]
            assert re.fullmatch(r"<!-- no-run: .+ -->", before), found[0]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_documentation_leads_somewhere(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text())
    for link in _LINK.findall(prose):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", target.read_text()), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {link}"


def test_every_argument_of_the_loader_is_in_one_group_of_its_page() -> None:
    text = (ROOT / "docs" / "loader.md").read_text()
    rows = text.partition("| group | arguments |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", rows)
    assert sorted(named) == sorted(inspect.signature(DistributedDataLoader).parameters)


# The sections of the command lines' page that tables of options stand in, and the commands whose help they are about.
SECTIONS = {f"penstock {name}": [[name]] for name in COMMANDS}
SECTIONS["penstock state"] = [["state", "show"], ["state", "skip"]]
SECTIONS["penstock bench --quick"] = [["bench", "--quick"]]
_OPTION = r"--[a-z][a-z0-9-]*"


def section_of(heading: str) -> str:
    """What stands below a heading of the page, up to the next of that level or of another command; without examples."""
    found, is_inside = "", False
    for line in _FENCE.sub("", (ROOT / "docs" / "cli.md").read_text()).splitlines():
        title = line.lstrip("#").strip()
        if line.startswith("## ") or (line.startswith("#") and title in SECTIONS):
            is_inside = title == heading
        elif is_inside:
            found += line + "\n"
    return found


def named_in(text: str) -> set[str]:
    return set(re.findall(rf"`({_OPTION})", text))


def options_in_tables(section: str) -> set[str]:
    return named_in("\n".join(re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)))


def options_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What ``--help`` lists, but for itself."""
    with pytest.raises(SystemExit):
        run([*command, "--help"])
    options = set(re.findall(rf"^[│ ] ({_OPTION})", capsys.readouterr().out, re.MULTILINE))
    assert "--json" in options, "every command has it"
    return options


def common_options(command: list[str]) -> set[str]:
    """Those of a command that the page's section of common options is about."""
    common = options_in_tables(section_of("Common options"))
    if command[0] in ("pack", "export"):
        return set()
    if command[0] in ("audit", "doctor", "top", "scale", "report", "state") or command == ["bench", "--quick"]:
        return {"--json"}
    return common if command[0] in ("index", "verify") else common - {"--threads"}


def test_every_command_has_a_section_in_the_command_lines_page() -> None:
    headings = re.findall(r"^##+ (.+)$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert set(SECTIONS) <= set(headings)


@pytest.mark.parametrize("heading", SECTIONS)
def test_options_that_a_section_names_are_those_of_its_command(
    heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The generated reference lists all options, by tests/test_site.py; sections name those that need words."""
    options = set()
    for command in SECTIONS[heading]:
        own = options_of(command, capsys)
        assert common_options(command) <= own, command
        options |= own
    if heading == "penstock bench --quick":
        options |= {"--quick", "--full"}
    assert named_in(section_of(heading)) <= options


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, options) of each command line of penstock that a page shows; what stands behind two spaces is prose."""
    for found in _FENCE.finditer(text):
        if found[1] not in ("python", "toml"):
            for name, rest in re.findall(rf"^penstock ({'|'.join(COMMANDS)})\b(.*)$", found[3], re.MULTILINE):
                yield name, re.findall(_OPTION, re.split(r"  |#", rest)[0])


@pytest.mark.slow
def test_commands_that_pages_show_have_these_options(capsys: pytest.CaptureFixture[str]) -> None:
    known = {name: options_of([name], capsys) for name in COMMANDS if name != "state"}
    known["bench"] |= options_of(["bench", "--quick"], capsys) | {"--quick", "--full"}
    shown = [(page, name, options) for page in PAGES for name, options in commands(page.read_text())]
    assert len(shown) > 20
    for page, name, options in shown:
        assert set(options) <= known[name], (page.name, name, options)
