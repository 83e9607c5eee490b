"""The documentation as a site: ``python tools/docs_site.py [--out DIR]`` builds it; mkdocs loads this file as hooks.

The build is strict: a link to a page, a heading or a file that does not exist is an error, and so is a page without an
entry in ``mkdocs.yml``. Packages come from ``requirements/docs.lock`` into an environment of their own (.cache/docs).
Pages link to files outside ``docs`` (README, examples, benchmarks): in the site these lie under ``repository/``.
Addresses of pages before they were sorted into folders lead to the new ones.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import subprocess
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".cache" / "docs"
LOCK = ROOT / "requirements" / "docs.lock"
REPOSITORY = "repository"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
SCHEME = re.compile(r"[a-z]+:|/")
FOLDERS = ("how-to", "reference", "explanation")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "docs-site")
    out = parser.parse_args().out.resolve()
    python = ENVIRONMENT / "bin" / "python"
    stamp, lock = ENVIRONMENT / "lock", LOCK.read_text()
    if not stamp.exists() or stamp.read_text() != lock:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", str(LOCK)]
        if code := subprocess.call([python, *install]):
            return code
        stamp.write_text(lock)
    # The notice says that mkdocs-material gets fixes until May 2027 and that Zensical, its successor, reads mkdocs.yml.
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.call(build, cwd=ROOT, env=quiet)


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs to which pages link."""
    from mkdocs.structure.files import File

    pages, seen = [page.src_uri for page in files.documentation_pages()], set()
    while pages:
        page = pages.pop()
        for target in _outside(page, _source(page).read_text(encoding="utf-8")):
            uri = f"{REPOSITORY}/{target}"
            if uri in seen:
                continue
            seen.add(uri)
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                pages.append(uri)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    return LINK.sub(lambda link: f"{link[1]}{_moved(here, link[2])}{link[3]}", markdown)


def on_post_build(config: Any) -> None:
    for folder in FOLDERS:
        for page in (ROOT / "docs" / folder).glob("*.md"):
            target = f"{folder}/{page.stem}.html"
            text = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}"><a href="{target}">moved</a>\n'
            Path(config["site_dir"], f"{page.stem}.html").write_text(text, encoding="utf-8")


def _source(uri: str) -> Path:
    return ROOT / uri.removeprefix(f"{REPOSITORY}/") if uri.startswith(REPOSITORY) else ROOT / "docs" / uri


def _target(page: str, link: str) -> str:
    """The path in the repository to which ``link`` in ``page`` leads."""
    folder = _source(page).parent.relative_to(ROOT).as_posix()
    target = posixpath.normpath(posixpath.join(folder, link))
    return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target


def _outside(page: str, markdown: str) -> list[str]:
    targets = [_target(page, link[2]) for link in LINK.finditer(markdown) if not SCHEME.match(link[2])]
    return [one for one in targets if not one.startswith(("docs/", "..")) and (ROOT / one).is_file()]


def _moved(page: str, link: str) -> str:
    """The link as the site needs it; one that leads nowhere stays, and mkdocs reports it."""
    if SCHEME.match(link):
        return link
    target = _target(page, link)
    uri = target.removeprefix("docs/") if target.startswith("docs/") else f"{REPOSITORY}/{target}"
    return posixpath.relpath(uri, posixpath.dirname(page) or ".")


if __name__ == "__main__":
    raise SystemExit(main())
