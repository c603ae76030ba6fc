"""Events of mkdocs: pages that are made of other files are added, and all pages' links are made those of the site."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from devtools.pages import commands, faces, links, notebooks, reference

COMMANDS_PAGE = "reference/commands.md"
_APART = InclusionLevel.NOT_IN_NAV


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, the command line's reference, notebooks, and what pages link to outside of docs/."""
    names = faces.public_names()
    wanted: dict[PurePosixPath, None] = {}
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for uri, text in pages.items():
        _follow(text, PurePosixPath("docs", uri), uri, wanted)
    for root, uri in links.ROOT_PAGES.items():
        if links.is_page(uri):
            text = _follow((faces.ROOT / root).read_text(), PurePosixPath(root), uri, wanted)
            files.append(File.generated(config, uri, content=links.plain_fences(text)))
    for notebook in sorted((faces.ROOT / "docs" / "notebooks").glob("*.ipynb")):
        uri = f"notebooks/{notebook.stem}.md"
        text = _follow(
            notebooks.page_of_notebook(notebook.read_text()), PurePosixPath("docs/notebooks/x.md"), uri, wanted
        )
        files.append(File.generated(config, uri, content=text))
    files.append(File.generated(config, COMMANDS_PAGE, content=commands.commands_page()))
    _check_reference((text for uri, text in pages.items() if uri.startswith("reference/")), names)
    _add_files(files, config, wanted)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make a page of docs/ one of the site."""
    uri = page.file.src_uri
    if page.file.generated_by is not None:
        return markdown
    markdown = links.rewrite_links(markdown, PurePosixPath("docs", uri), uri, lambda path: None)
    if uri.startswith("reference/"):
        markdown = reference.insert_docstrings(markdown, faces.public_names())
    return links.plain_fences(markdown)


def _follow(text: str, real: PurePosixPath, uri: str, wanted: dict[PurePosixPath, None]) -> str:
    try:
        return links.rewrite_links(text, real, uri, wanted.setdefault)
    except FileNotFoundError as exc:
        raise PluginError(str(exc)) from exc


def _check_reference(pages: Iterable[str], names: dict[str, faces.PublicName]) -> None:
    if missing := reference.missing_names(pages, names):
        raise PluginError(f"docs/reference has no heading for {', '.join(missing)}")
    if silent := faces.undocumented(names):
        raise PluginError(f"public names without a docstring: {', '.join(silent)}")


def _add_files(files: Files, config: MkDocsConfig, wanted: dict[PurePosixPath, None]) -> None:
    """Add what links lead to; a folder as a page that lists its files."""
    for path in list(wanted):
        if (faces.ROOT / path).is_dir():
            text, inside = links.page_of_folder(path)
            files.append(File.generated(config, links.place_of(path), content=text, inclusion=_APART))
            wanted |= dict.fromkeys(inside)
    for path in wanted:
        place = links.place_of(path)
        if (faces.ROOT / path).is_dir() or files.get_file_from_path(place):
            continue
        if links.is_page(place):
            files.append(File.generated(config, place, content=links.page_of_source(path), inclusion=_APART))
        else:
            files.append(File.generated(config, place, abs_src_path=str(faces.ROOT / path)))
