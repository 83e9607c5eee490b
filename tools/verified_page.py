"""docs/verified.md from signed records: ``python tools/verified_page.py docs``.

``docs/verified/`` holds records with their signatures and ``allowed_signers`` (ssh-keygen(1)): who may vouch. A record
that is a rehearsal, that failed, or whose signature does not hold for an acceptance is refused, and the page is not
written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from muster.accept.ladder import DOLLARS
from muster.accept.record import ACCEPTANCE
from muster.core.clock import SystemShell
from muster.core.errors import UsageError
from muster.core.protocols import Shell
from muster.core.typed_json import JsonObject, children, parse_object, text, texts

PAGE, FOLDER, SIGNERS = "verified.md", "verified", "allowed_signers"
BEGIN, END = "<!-- records -->", "<!-- end of records -->"
NONE = "None yet: no record was sent."


def table(folder: Path, shell: Shell) -> str:
    """Of every record in ``folder``. Raises UsageError: one that may not be in it, with the reason."""
    rows = [_row(path, folder / SIGNERS, shell) for path in sorted(folder.glob("*.json"))]
    if not rows:
        return NONE
    head = "| where | machine | levels | at most | Muster | when | signed by |\n|---|---|---|--:|---|---|---|"
    return "\n".join([head, *rows])


def verified(path: Path, signers: Path, shell: Shell) -> tuple[JsonObject, str]:
    """(the record, who signed it). Raises UsageError: it is none that counts."""
    signature = path.with_name(path.name + ".sig")
    if not signature.exists() or not signers.exists():
        raise UsageError(f"{path.name} has no signature, or {signers.name} names no signer")
    shown = shell.run(["ssh-keygen", "-Y", "find-principals", "-f", str(signers), "-s", str(signature)], timeout_s=60)
    who = shown.stdout.strip().splitlines()[0] if shown.returncode == 0 and shown.stdout.strip() else ""
    argv = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", who, "-n", ACCEPTANCE, "-s", str(signature)]
    content = path.read_text(encoding="utf-8")
    done = shell.run(argv, stdin=content, timeout_s=60) if who else shown
    if not who or done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()
        raise UsageError(f"{path.name}: the signature does not hold for an acceptance: {reason}")
    found = parse_object(content)
    if found.get("rehearsal") is not None:
        raise UsageError(f"{path.name} is a rehearsal against {text(found, 'rehearsal')}")
    if found.get("accepted") is not True:
        raise UsageError(f"{path.name} was not accepted: it says what failed")
    return found, who


def written(page: str, rows: str) -> str:
    """The page with ``rows`` between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}"


def _row(path: Path, signers: Path, shell: Shell) -> str:
    found, who = verified(path, signers, shell)
    passed = sum(text(one, "outcome") == "passed" for one in children(found, "rungs"))
    where = f"{text(found, 'backend')} {' '.join(texts(found, 'locations'))}".strip()
    machine = f"{found.get('machine') or 'none named'} {found.get('provisioning_model') or ''}".strip()
    cells = [
        where, machine, f"{passed} of {len(children(found, 'rungs'))}", _spent(found),
        text(found, "muster"), text(found, "ended")[:10], who,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _spent(found: JsonObject) -> str:
    if DOLLARS.key + "_at_most" in found:
        return f"${found['usd_at_most']}"
    return f"{found['host_hours_at_most']} host-hours, price not known"


def main(docs: Path) -> None:
    page = docs / PAGE
    page.write_text(written(page.read_text(encoding="utf-8"), table(docs / FOLDER, SystemShell())), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
