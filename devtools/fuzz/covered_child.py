"""The child of the engine "cover": atheris rewrites our parsers while they are imported, to see their lines."""

from __future__ import annotations

from penstock.benchmarks.child_arguments import take_arguments


def main() -> None:
    arguments = take_arguments("ENGINE TARGET SEED SECONDS FOLDER", "python -m devtools fuzz")
    import atheris  # type: ignore[import-untyped, unused-ignore]

    with atheris.instrument_imports(include=["penstock.loader", "penstock.storage"]):
        from . import child
    child.main(*arguments)


if __name__ == "__main__":
    main()
