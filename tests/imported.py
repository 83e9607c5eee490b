"""What a module imports, from its byte code.

Not from ``ast.parse``: CPython 3.11's fails with "AST constructor recursion depth mismatch" where the collector or
another thread parses in its midst (gh-106905). Compiling makes no such objects.
"""

import dis
import functools
from pathlib import Path
from types import CodeType


@functools.cache
def imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """(module, line, by a statement at the left margin) for every import in the file, functions' too.

    What a module takes from ``muster`` itself is named as a module. A branch that the compiler leaves out (``if
    False:``) is not seen.
    """
    whole = compile(path.read_text(), str(path), "exec", dont_inherit=True)
    found = []
    codes = [whole]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname != "IMPORT_NAME":
                continue
            at = step.positions
            assert at is not None and at.lineno is not None, "byte code without positions (-X no_debug_ranges)"
            assert level.argval == 0, f"{path}:{at.lineno}: relative import"
            top = code is whole and at.col_offset == 0
            found.append((step.argval, at.lineno, top))
            if step.argval == "muster":
                found += [(f"muster.{name}", at.lineno, top) for name in names.argval or ()]
    return tuple(found)
