"""What docs/security.md says of the source: what is unpickled, run, served and trusted, and where."""

from __future__ import annotations

import ast
import io
import re
import tarfile
from functools import cache
from pathlib import Path

import pytest

from penstock import DistributedDataLoader, pack
from penstock.loader import DoubtfulDatasetWarning

ROOT = Path(__file__).parents[1]
ROOMS = ("storage", "loader", "tools", "trainer", "benchmarks", "cli", "devtools")

# Modules whose functions run what they are given, and who may call them, on what.
RISKY = {
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "torch": {"load"},
    "np": {"load"},
    "numpy": {"load"},
    "joblib": {"load"},
    "yaml": {"load", "unsafe_load", "full_load"},
    "builtins": {"eval", "exec", "compile"},
    "os": {"system", "popen"},
}
ALLOWED = {
    "loader/decoding/workers/channel.py": {"pickle.loads"},  # over a socket pair with processes that this one started
    "loader/decoding/workers/main.py": {"pickle.loads"},  # the user's functions, from the process that started it
    "loader/decoding/workers/pool.py": {"pickle.loads"},  # exceptions, from processes that this one started
    "loader/pipeline/beside/board.py": {
        "pickle.loads"
    },  # a report in memory that a process which this one started shares
    "loader/pipeline/beside/failures.py": {"pickle.loads"},  # exceptions, from that process
    "loader/pipeline/beside/frames.py": {"pickle.loads"},  # its messages
    "loader/pipeline/beside/process.py": {"pickle.loads"},  # its warnings
    "loader/reading/spread_sums.py": {"np.load(allow_pickle=False)"},
    "tools/packing/values.py": {"np.load(allow_pickle=False)"},
    "devtools/pages/notebooks.py": {"builtins.compile", "builtins.eval", "builtins.exec"},  # this repository's own
    "devtools/reuse/keepers.py": {"pickle.loads"},  # what it has just pickled itself
    "benchmarks/harness/peer_decode.py": {"np.load(allow_pickle=False)"},
    "benchmarks/contenders/torch_loader.py": {"np.load(allow_pickle=False)"},
    "benchmarks/contenders/webdataset.py": {"np.load(allow_pickle=False)"},
    "trainer/checkpoint/settings.py": {"torch.load(weights_only=True)"},
    "trainer/checkpoint/readable.py": {"torch.load"},  # what this process has just written, before it is saved
}


def texts() -> list[tuple[str, str]]:
    """Every file of the package, by its path."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


@cache
def sources() -> list[tuple[str, ast.Module]]:
    return [(path, ast.parse(text, path)) for path, text in texts()]


def risky_calls(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            module, name = function.value.id, function.attr
        elif isinstance(function, ast.Name):
            module, name = "builtins", function.id
        else:
            continue
        if name in RISKY.get(module, set()):
            given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
            safe = "(allow_pickle=False)" if given.get("allow_pickle") is False else ""
            safe = "(weights_only=True)" if given.get("weights_only") is True else safe
            found.add(f"{module}.{name}{safe}")
    return found


@pytest.mark.slow
def test_nothing_is_unpickled_or_run_but_what_processes_of_a_run_send_each_other() -> None:
    found = {path: calls for path, tree in sources() if (calls := risky_calls(tree))}
    assert found == ALLOWED


@pytest.mark.slow
def test_no_code_asks_a_shell_or_serves_on_all_addresses() -> None:
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                pytest.fail(f"{path}:{node.value.lineno} runs a shell")
            is_address = isinstance(node, ast.Constant) and node.value == "0.0.0.0"
            assert not is_address, f"{path}:{getattr(node, 'lineno', 0)} names all addresses"


def test_certificates_are_left_unchecked_in_one_place_alone_where_the_user_asks() -> None:
    naming = [path for path, text in texts() if re.search(r"CERT_NONE|_create_unverified", text)]
    assert naming == ["storage/clients/web.py"]


def test_members_named_like_paths_are_keys_and_touch_no_file(tmp_path: Path) -> None:
    shards, work = tmp_path / "a" / "b" / "shards", tmp_path / "a" / "b" / "work"
    shards.mkdir(parents=True)
    names = ["../../evil.txt", str(tmp_path / "absolute.txt"), "./././../up.txt", "plain.txt"]
    with tarfile.open(shards / "0.tar", "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    left_out = "'link.txt' is a symbolic link to '/etc/passwd'.*left out"
    with (
        pytest.warns(DoubtfulDatasetWarning, match=left_out),
        DistributedDataLoader(shards, batch_size=1, last_batch="partial", decode=None, cache_dir=work) as loader,
    ):
        values = [bytes(batch["txt"][0]) for batch in loader]
    assert values == [b"data"] * len(names)
    with pytest.warns(DoubtfulDatasetWarning, match=left_out):  # once, when the node indexes them
        pack(shards, work / "jsonl", format="jsonl", progress=False)
    pack(shards, work / "parquet", format="parquet", progress=False)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and work not in path.parents]
    assert outside == [shards / "0.tar"]


def test_each_test_that_the_threat_model_names_is_there() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 20
    assert named - there == set()
