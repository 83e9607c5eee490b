"""What a module imports, from its byte code.

Not from ``ast.parse``: CPython 3.11's fails with "AST constructor recursion depth mismatch" where the collector or
another thread parses in its midst (gh-106905). Compiling makes no such objects.
"""

import dis
import functools
from pathlib import Path
from types import CodeType

SOURCE = Path(__file__).parents[1] / "src"


@functools.cache
def imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """(module, line, at the left margin) for every import in the file: in functions and under ``TYPE_CHECKING`` too.

    ``from muster.package import module`` names that module. A branch that the compiler leaves out (``if False:``) is
    not seen.
    """
    whole = compile(path.read_text(), str(path), "exec", dont_inherit=True)
    imported = []
    codes = [whole]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname != "IMPORT_NAME":
                continue
            at = step.positions
            assert at is not None and at.lineno is not None, "byte code without positions (-X no_debug_ranges)"
            assert level.argval == 0, f"{path}:{at.lineno}: relative import"
            top = code is whole and at.col_offset == 0
            modules = [f"{step.argval}.{name}" for name in names.argval or () if is_ours(f"{step.argval}.{name}")]
            if not modules or len(modules) < len(names.argval):
                modules.append(step.argval)
            imported += [(module, at.lineno, top) for module in modules]
    return tuple(imported)


def is_ours(module: str) -> bool:
    path = SOURCE.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()
