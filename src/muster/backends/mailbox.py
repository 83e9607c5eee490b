"""Questions to a run that accepts no connections: one letter at a time in the run's home, answered by its host.

A box is two small objects below the home, each changed by conditional writes alone: ``mail/BOX.json``, the newest
letter, and ``mail/BOX.answer.json``, who took it and what came of it. Letters carry rising numbers and a MAC by the
run's token over everything in them and where they lie. So

* a letter that arrived twice, or was written twice because an answer was lost, is one letter;
* an older letter that is put back has a number that was answered, or a time that is over;
* a letter of another run, of another box or of a sender without the token is not read;
* a letter is acted on once: it is taken before it is acted on, and one that was taken is never taken again, by the same
  host even if the answer is deleted. A host that dies in between leaves it unanswered, and the sender gets an error;
* a letter that no host took in time is taken by its sender, so that no host carries it out after the sender gave up.

A box costs its reader one read of a few hundred bytes for each look.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from muster.core.clock import SystemClock
from muster.core.errors import BackendError, ConflictError, MusterError
from muster.core.protocols import Clock, Store, Stored
from muster.core.typed_json import Count, Int64, Name, Record, Unreadable, decode, encode
from muster.storage import uris

FOLDER = "mail"
SUPERVISOR = "supervisor"
"""The box that the holder of the run's lease reads."""
LOOK_S = 1.0
"""Between two looks for an answer."""
SKEW_S = 60.0
"""By which the clocks of the two ends may differ."""
LARGEST_BYTES = 4 * 1024 * 1024
"""Of a letter or an answer."""
TRIES = 20
"""Against other writers of the same box."""

Act = Callable[[str, str], str]
"""What a letter asks, by its kind and its text; returns the answer. Raises MusterError: the sender gets it."""


@dataclass(frozen=True, kw_only=True)
class Letter(Record):
    """A request to a host."""

    number: Count
    id: Name
    kind: Name
    text: str
    until_wall_ns: Int64
    """No host acts on it after this moment."""
    mac: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer(Record):
    """To the letter of that number: taken, then answered."""

    number: Count
    id: Name
    done: bool = False
    text: str = ""
    error: str = ""
    hint: str = ""
    exit_code: Int64 = 0
    mac: str = ""


@dataclass(kw_only=True)
class Box:
    """One box of one run, as either end sees it. Not for several threads."""

    store: Store
    home: str
    """URI of the run's home."""
    name: str
    run_id: str
    token: bytes
    clock: Clock = field(default_factory=SystemClock)
    wall_ns: Callable[[], int] = time.time_ns
    _acted_on: set[str] = field(default_factory=set)
    """Ids of letters that were taken here."""
    _seen: str = ""
    """Generation of the letter that was looked at last: most looks end there."""

    # ------------------------------------------------------------ who asks

    def send(self, kind: str, text: str, *, timeout_s: float) -> str:
        """Write a letter and wait for its answer.

        Raises:
            BackendError: no host took it in time (then none will), or the one that took it did not answer; or it was
                refused, with the host's own words.
        """
        until = self.clock.monotonic_ns() + int(timeout_s * 1e9)
        letter = self._post(kind, text, until)
        taken = False
        while True:
            answer, generation = self._answer()
            if answer is not None and answer.id == letter.id:
                if answer.done:
                    if answer.error:
                        raise BackendError(answer.error, hint=answer.hint or None)
                    return answer.text
                taken = True
            elif answer is not None and answer.number > letter.number:
                raise BackendError("another question took the place of this one", hint="ask again")
            if self.clock.monotonic_ns() < until:
                self.clock.sleep(LOOK_S)
                continue
            if taken or not self._withdraw(letter, generation):
                problem = f"the question was taken and not answered in {timeout_s:.0f} s: it may have been done"
            else:
                problem = f"no host of {self.run_id} took the question in {timeout_s:.0f} s"
            raise BackendError(problem, hint=f"muster status {self.run_id}")

    def _withdraw(self, letter: Letter, generation: str | None) -> bool:
        """Take it ourselves, over the answer ``generation``: no host acts on it later. False: one was faster."""
        own = Answer(number=letter.number, id=letter.id, done=True, error="no host took it in time: it was withdrawn")
        try:
            self._put(self._uri("answer."), encode(replace(own, mac=self._mac(own))), generation)
            return True
        except ConflictError:
            return False

    def _post(self, kind: str, text: str, until: int) -> Letter:
        own = secrets.token_hex(16)
        while True:
            there, generation = self._letter()
            answered = self._answer()[0]
            busy = there is not None and not self._over(there) and (answered is None or answered.number < there.number)
            if not busy:
                number = 1 + max(there.number if there else 0, answered.number if answered else 0)
                left_ns = max(0, until - self.clock.monotonic_ns())
                letter = Letter(number=number, id=own, kind=kind, text=text, until_wall_ns=self.wall_ns() + left_ns)
                letter = replace(letter, mac=self._mac(letter))
                data = encode(letter)
                if len(data) > LARGEST_BYTES:
                    raise BackendError(f"a question of {len(data)} bytes, at most {LARGEST_BYTES} are carried")
                try:
                    self._put(self._uri(), data, generation)
                    return letter
                except ConflictError:
                    there, _ = self._letter()
                    if there is not None and there.id == own:  # an answer of the store's was lost
                        return there
            if self.clock.monotonic_ns() >= until:
                raise BackendError("another question waits for its answer", hint="ask again in a minute")
            self.clock.sleep(LOOK_S)

    # ------------------------------------------------------------ who answers

    def serve_once(self, act: Act) -> bool:
        """Look for a letter, act on it and answer; whether there was one. Blocks as long as ``act``.

        Raises:
            MusterError: the home does not answer.
        """
        try:
            found = self.store.get(self._uri())
        except FileNotFoundError:
            return False
        if found.generation == self._seen:
            return False
        letter = self._read(found)
        if letter is None:
            self._seen = found.generation
            return False
        before, generation = self._answer()
        if letter.id in self._acted_on or (before is not None and before.number >= letter.number):
            self._seen = found.generation
            return False
        taken = Answer(number=letter.number, id=letter.id)
        try:
            generation = self._put(self._uri("answer."), encode(replace(taken, mac=self._mac(taken))), generation)
        except ConflictError:  # another host was faster, or this answer was lost: it is not known, so nothing is done
            return False
        self._seen = found.generation
        self._acted_on.add(letter.id)
        result = self._acted(act, letter, taken)
        data = encode(replace(result, mac=self._mac(result)))
        if len(data) > LARGEST_BYTES:
            result = replace(taken, done=True, error=f"the answer has {len(data)} bytes, too many to be carried")
            data = encode(replace(result, mac=self._mac(result)))
        self._put(self._uri("answer."), data, generation)
        return True

    def _acted(self, act: Act, letter: Letter, taken: Answer) -> Answer:
        if self._over(letter):
            late_s = (self.wall_ns() - letter.until_wall_ns) / 1e9
            return replace(taken, done=True, error=f"the question came {late_s:.0f} s after its time: nothing was done")
        try:
            return replace(taken, done=True, text=act(letter.kind, letter.text))
        except MusterError as error:
            said = str(error)
            return replace(taken, done=True, error=said, hint=error.hint or "", exit_code=error.exit_code)

    # ------------------------------------------------------------ both

    def _over(self, letter: Letter) -> bool:
        return self.wall_ns() > letter.until_wall_ns + int(SKEW_S * 1e9)

    def _uri(self, what: str = "") -> str:
        return uris.join(self.home, FOLDER, f"{self.name}.{what}json")

    def _letter(self) -> tuple[Letter | None, str | None]:
        """The one in the box and its generation; one that is not the run's own is written over."""
        try:
            found = self.store.get(self._uri())
        except FileNotFoundError:
            return None, None
        return self._read(found), found.generation

    def _read(self, found: Stored) -> Letter | None:
        try:
            letter = decode(Letter, found.data)
        except Unreadable:
            return None
        return letter if self._is_own(letter) else None

    def _answer(self) -> tuple[Answer | None, str | None]:
        try:
            found = self.store.get(self._uri("answer."))
        except FileNotFoundError:
            return None, None
        try:
            answer = decode(Answer, found.data)
        except Unreadable:
            return None, found.generation
        return (answer if self._is_own(answer) else None), found.generation

    def _put(self, uri: str, data: bytes, generation: str | None) -> str:
        if generation is None:
            return self.store.put_if_absent(uri, data)
        return self.store.put_if(uri, data, generation)

    def _is_own(self, record: Letter | Answer) -> bool:
        """Whether its writer has the run's token, and meant this box. As bytes: text is compared if it is ASCII."""
        return hmac.compare_digest(record.mac.encode(), self._mac(record).encode())

    def _mac(self, record: Letter | Answer) -> str:
        """Over what it says, what it is and where it lies."""
        said = encode(replace(record, mac="")).decode()
        words = json.dumps(["mailbox", self.run_id, self.name, type(record).__name__, said])
        return hmac.digest(self.token, words.encode(), "sha256").hex()
