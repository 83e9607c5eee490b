"""Rename modules and names over the whole repository, from a table: ``python tools/rename.py tools/renames/NAME.toml``.

A table has any of these parts; each is applied to every text file that git tracks:

* ``[modules]``  "old.dotted.path" = "new.dotted.path": the file is moved (``git mv``), every import of it is rewritten,
  and so is each use of its last component as a name where a module was imported as a whole.
* ``[moved]``    "old.module:Name" = "new.module:Name": only imports change (the definition is moved by hand).
* ``[text]``     "Old" = "New": whole words anywhere: code, comments, strings, documents. For names that are no English
  words.
* ``[[code]]``   files = ["glob", ...], names = {old = "new", ...}: identifiers in Python code, in f-strings' braces and
  between back quotes; prose and other strings stay.
* ``[[regex]]`` files = [...], pattern = "...", replace = "...": a regular expression, in files of any kind.
* ``[[strings]]`` files = [...], names = {...}: whole string literals (a key of an event, of a JSON object, of a run
  file).

Run it on a clean checkout and commit the result alone; list the commit in ``.git-blame-ignore-revs``.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BINARY = {".png", ".gz", ".sqlite", ".safetensors", ".pyc", ".svg"}
#: Stands for ``muster`` in what is rewritten already, so that a path that begins like an old one is left alone.
DONE = "m\u00fcster"
#: Generated or foreign text, and the tables themselves.
SKIP = ("tools/renames/*", "*.min.js", "*.min.css", "CHANGELOG.md", ".git-blame-ignore-revs")


def tracked() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in sorted(set(listed.split("\0")) - {""}):
        path = ROOT / name
        if path.is_file() and path.suffix not in BINARY and not any(fnmatch.fnmatch(name, each) for each in SKIP):
            yield path


def path_of(module: str) -> Path:
    file = ROOT / "src" / Path(*module.split("."))
    return file / "__init__.py" if file.is_dir() and not file.with_suffix(".py").exists() else file.with_suffix(".py")


# ---------------------------------------------------------------- modules


def move_files(modules: Mapping[str, str]) -> None:
    for old, new in sorted(modules.items(), key=lambda each: -each[0].count(".")):  # a package after what is in it
        source = path_of(old)
        target = ROOT / "src" / Path(*new.split(".")).with_suffix(".py")
        if source.name == "__init__.py":
            target = target.with_suffix("") / "__init__.py"
        for folder in reversed(target.relative_to(ROOT / "src" / "muster").parents[:-1]):
            package = ROOT / "src" / "muster" / folder / "__init__.py"
            package.parent.mkdir(parents=True, exist_ok=True)
            if not package.exists():
                package.touch()
                subprocess.run(["git", "add", str(package)], cwd=ROOT, check=True)
        subprocess.run(["git", "mv", "-f", str(source), str(target)], cwd=ROOT, check=True)


def rewrite_imports(text: str, modules: Mapping[str, str], moved: Mapping[str, str], where: str) -> str:
    tree = ast.parse(text)
    lines = text.split("\n")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    renamed: dict[str, str] = {}
    statements: list[tuple[ast.ImportFrom, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None or not node.module.startswith("muster"):
            continue
        groups: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            package, name, local = _target(node.module, alias, modules, moved)
            if alias.asname is None and name != alias.name and name in used:
                print(f"{where}: {name} is in use already; {node.module}.{alias.name} keeps its name there")
                local = alias.name
            elif alias.asname is None and name != alias.name:
                renamed[alias.name] = name
            changed = changed or (package, name, local) != (node.module, alias.name, alias.asname)
            groups.setdefault(package, []).append(f"{name} as {local}" if local and local != name else name)
        if changed:
            statements.append((node, _import_lines(node, groups, lines)))
    text = _apply(tree, lines, statements, renamed)
    for old, new in renamed.items():  # positions inside f-strings are not exact in Python 3.11
        text = _in_fstrings(text, {old: new}, attributes=False)
    return text


def _target(
    module: str, alias: ast.alias, modules: Mapping[str, str], moved: Mapping[str, str]
) -> tuple[str, str, str | None]:
    """Package, name and local name of one imported name in the new tree."""
    dotted, single = f"{module}.{alias.name}", f"{module}:{alias.name}"
    package, name = modules.get(module, module), alias.name
    if dotted in modules:
        package, _, name = modules[dotted].rpartition(".")
    elif single in moved:
        package, _, name = moved[single].partition(":")
    return package, name, alias.asname


def _import_lines(node: ast.ImportFrom, groups: Mapping[str, list[str]], lines: list[str]) -> str:
    indent = " " * node.col_offset
    comment = re.search(r"  #.*$", lines[node.end_lineno - 1]) or re.search(r"  #.*$", lines[node.lineno - 1])
    tail = comment.group() if comment else ""
    new = []
    for package, names in sorted(groups.items()):
        package = package.replace("muster", DONE, 1)
        line = f"{indent}from {package} import {', '.join(names)}{tail}"
        if len(line) > 120:
            body = "".join(f"{indent}    {name},\n" for name in names)
            line = f"{indent}from {package} import ({tail}\n{body}{indent})"
        new.append(line)
    return "\n".join(new)


def _apply(
    tree: ast.Module, lines: list[str], statements: list[tuple[ast.ImportFrom, str]], renamed: Mapping[str, str]
) -> str:
    edits = [((node.lineno, 0), (node.end_lineno, None), new) for node, new in statements]
    edits += [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset), renamed[n.id]) for n in _uses(tree, renamed)]
    inside = [(node.lineno, node.end_lineno) for node, _ in statements]
    raw = [line.encode() for line in lines]  # offsets of ast are in bytes
    for (row, column), (end, stop), new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        if stop is None:
            raw[row - 1 : end] = [new.encode()]
        elif not any(first <= row <= last for first, last in inside):
            assert row == end
            line = raw[row - 1]
            raw[row - 1] = line[:column] + new.encode() + line[stop:]
    return b"\n".join(raw).decode()


def _uses(tree: ast.Module, renamed: Mapping[str, str]) -> Iterator[ast.Name]:
    """Names that mean the imported module: not those that a function binds itself."""
    formatted = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}

    def visit(node: ast.AST, hidden: frozenset[str]) -> Iterator[ast.Name]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = node.args
            bound = {each.arg for each in [*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs]}
            bound |= {each.arg for each in (arguments.vararg, arguments.kwarg) if each}
            body = node.body if isinstance(node.body, list) else [node.body]
            for inner in body:
                names = (each for each in ast.walk(inner) if isinstance(each, ast.Name))
                bound |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
            outer = [*arguments.defaults, *[each for each in arguments.kw_defaults if each]]
            outer += [] if isinstance(node, ast.Lambda) else node.decorator_list
            for inner in outer:
                yield from visit(inner, hidden)
            for inner in body:
                yield from visit(inner, hidden | (bound & set(renamed)))
            for each in [*arguments.args, *arguments.kwonlyargs]:
                if each.annotation:
                    yield from visit(each.annotation, hidden)
            if not isinstance(node, ast.Lambda) and node.returns:
                yield from visit(node.returns, hidden)
            return
        if isinstance(node, ast.Name) and node.id in renamed and node.id not in hidden and id(node) not in formatted:
            yield node
        for inner in ast.iter_child_nodes(node):
            yield from visit(inner, hidden)

    yield from visit(tree, frozenset())


def rewrite_paths(text: str, modules: Mapping[str, str]) -> str:
    """Dotted paths in strings and documents, and paths of files."""
    table = {}
    for old, new in modules.items():
        table[old] = new
        table[old.replace(".", "/") + ".py"] = new.replace(".", "/") + ".py"
        short = old.removeprefix("muster.")
        if "." in short:
            table[short.replace(".", "/") + ".py"] = new.removeprefix("muster.").replace(".", "/") + ".py"
    return _words(text, table)


# ---------------------------------------------------------------- names


def _words(text: str, table: Mapping[str, str]) -> str:
    if not table:
        return text
    alternatives = "|".join(re.escape(old) for old in sorted(table, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.]){'(?:' + alternatives + ')'}(?!\w)")
    return pattern.sub(lambda found: table[found.group()], text)


def _anywhere(text: str, table: Mapping[str, str]) -> str:
    if not table:
        return text
    alternatives = "|".join(re.escape(old) for old in sorted(table, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{alternatives})(?!\w)", lambda found: table[found.group()], text)


def _in_fstrings(text: str, names: Mapping[str, str], *, attributes: bool) -> str:
    """Names between the braces of f-strings and (``attributes``) between back quotes."""
    pattern = re.compile(rf"(?<![\w{'' if attributes else '.'}])(?:{'|'.join(map(re.escape, names))})(?!\w)")

    def replaced(token: str) -> str:
        def swap(found: re.Match[str]) -> str:
            return pattern.sub(lambda each: names[each.group()], found.group())

        prefix = re.match(r"[A-Za-z]*", token).group().lower()
        if "f" in prefix:
            token = re.sub(r"\{[^{}]*\}", swap, token)
        return token

    return _tokens(text, string=replaced)


def _tokens(text: str, *, string=None, name=None, comment=None) -> str:  # type: ignore[no-untyped-def]
    lines = text.splitlines(keepends=True)
    edits = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        act = {tokenize.STRING: string, tokenize.NAME: name, tokenize.COMMENT: comment}.get(token.type)
        if act is not None and (new := act(token.string)) != token.string:
            edits.append((token.start, token.end, new))
    for (row, column), (end, stop), new in reversed(edits):
        before, after = lines[row - 1][:column], lines[end - 1][stop:]
        lines[row - 1 : end] = [before + new + after]
    return "".join(lines)


def rename_code(text: str, names: Mapping[str, str]) -> str:
    word = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)")

    def quoted(token: str) -> str:
        return re.sub(r"`[^`\n]*`", lambda span: word.sub(lambda each: names[each.group()], span.group()), token)

    text = _tokens(text, name=lambda token: names.get(token, token), string=quoted, comment=quoted)
    return _in_fstrings(text, names, attributes=True)


def rename_strings(text: str, names: Mapping[str, str]) -> str:
    def swap(token: str) -> str:
        found = re.fullmatch(r"([rbuRBU]*)(['\"])([^'\"]*)\2", token)
        return token if found is None or found[3] not in names else f"{found[1]}{found[2]}{names[found[3]]}{found[2]}"

    return _tokens(text, string=swap)


def main(table_file: str) -> None:
    table = tomllib.loads(Path(table_file).read_text(encoding="utf-8"))
    modules, moved, words = table.get("modules", {}), table.get("moved", {}), table.get("text", {})
    move_files(modules)
    for path in tracked():
        try:
            before = text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and (modules or moved):
            text = rewrite_imports(text, modules, moved, name)
        text = rewrite_paths(text, modules)
        text = _anywhere(text, words)
        for part in table.get("code", []):
            if path.suffix == ".py" and any(fnmatch.fnmatch(name, each) for each in part["files"]):
                text = rename_code(text, part["names"])
        for part in table.get("strings", []):
            if path.suffix == ".py" and any(fnmatch.fnmatch(name, each) for each in part["files"]):
                text = rename_strings(text, part["names"])
        for part in table.get("regex", []):
            if any(fnmatch.fnmatch(name, each) for each in part["files"]):
                text = re.sub(part["pattern"], part["replace"], text, flags=re.MULTILINE)
        text = text.replace(DONE, "muster")
        if text != before:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
