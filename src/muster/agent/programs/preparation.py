"""The programs of a host that serve no rank directly: setup, data preparation, notices of the cloud, GPU reset."""

from __future__ import annotations

import contextlib
import signal

from muster.agent.values.actions import CheckSetup, Program, StartProgram, StopProgram
from muster.agent.values.events import ProgramEnded, SetupFound
from muster.agent.values.state import NEVER, HostContext, HostState
from muster.core.errors import UsageError
from muster.core.typed_json import Unreadable
from muster.protocol.codec import reader_of
from muster.protocol.pipes import PREEMPTION_NOTICES, PREPARATION, DataFailed, DataPrepared, Preparing
from muster.protocol.to_supervisor import HostPreparing, ResetResult, StartFailed

SETUP, PREPARE, NOTICES, RESET = "setup", "prepare", "notices", "gpu-reset"
#: Data preparation that failed for another reason than the run file's is tried again after this long: a disk that was
#: full, a hub that did not answer.
RETRY_S = 10.0
#: Data preparation that was killed is restarted this often: what it has done is in the cache.
PREPARE_KILLS = 1
#: A preparation that takes longer says in the run's log each while how far it is, or which host it waits for.
NOTE_S = 60.0
#: In the host's folder in memory: the digest of the setup that this host has had. A new host has none.
SETUP_DONE = "setup.done"
#: NVIDIA gives no bound; a reset takes seconds. What holds a GPU besides the ranks (a monitor, a fabric's peers) makes
#: the tool refuse at once. One that waits for a broken driver cannot always be killed.
RESET_LIMIT_S = 120.0
_read_preparation = reader_of(PREPARATION)
_read_notice = reader_of(PREEMPTION_NOTICES)


def begin(ctx: HostContext) -> None:
    prepare(ctx)
    url = ctx.state.identity.metadata_url
    if url is not None:  # it ends where no metadata server is
        ctx.do(StartProgram(Program(NOTICES, ("muster.agent.preemption_watcher", url), reads="lines")))


def due_s(state: HostState) -> float:
    return min(state.preparation.retry_s, state.reset.by_s)


def tick(ctx: HostContext) -> None:
    if ctx.now_s >= ctx.state.preparation.retry_s:
        start_prepare(ctx)
    if ctx.now_s >= ctx.state.reset.by_s:
        ctx.do(StopProgram(RESET, leave=True))


# ---------------------------------------------------------------- setup


def prepare(ctx: HostContext) -> None:
    """The setup, once on a host (a restarted agent finds it done), then the data. Again where the run file changed."""
    ctx.state.preparation.prepared, ctx.state.preparation.failure = False, None
    ctx.do(CheckSetup(ctx.state.spec))


def start_setup(ctx: HostContext, found: SetupFound) -> None:
    identity, preparation = ctx.state.identity, ctx.state.preparation
    preparation.setup_began_s = ctx.now_s
    argv = (
        "muster.agent.ranks.setup_program", "--run-dir", str(identity.run_dir), "--log",
        str(identity.log_path(SETUP)), "--done", str(identity.memory.path(SETUP_DONE)), "--digest", found.digest,
    )  # fmt: skip
    ctx.do(StartProgram(Program(SETUP, argv, reads="all", env="run", spec=ctx.state.spec, most_bytes=1 << 16)))


def on_setup_ended(ctx: HostContext, event: ProgramEnded) -> bool:
    """Whether it is done. A failure is reported, not tried again."""
    host = ctx.state.host
    if event.code == 0:
        ctx.note(f"setup on {host} took {ctx.now_s - ctx.state.preparation.setup_began_s:.1f} s")
        ctx.keep_failure("data", None)
        return True
    failure = event.failure
    if failure is None:
        reason, hint = f"setup ended with code {event.code}; see logs/setup-{host}.log", None
        with contextlib.suppress(Unreadable, IndexError):
            failed = _read_preparation(event.output.strip().splitlines()[-1])
            if isinstance(failed, DataFailed):
                reason, hint = failed.error, failed.hint
        failure = StartFailed(reason=f"{host}: {reason}", exit_code=UsageError.exit_code, hint=hint)
    ctx.keep_failure("data", failure)
    return False


# ---------------------------------------------------------------- data preparation


def on_start(ctx: HostContext) -> None:
    """An attempt starts. Where preparation has failed it is tried again now, and what comes of it is reported."""
    preparation = ctx.state.preparation
    failed, preparation.failure = preparation.failure is not None, None
    if failed and not preparation.running:
        start_prepare(ctx)


def start_prepare(ctx: HostContext) -> None:
    """An earlier one, of another run file, is heard of no more."""
    preparation, spec = ctx.state.preparation, ctx.state.spec
    preparation.retry_s = NEVER
    if spec.data is None:
        preparation.prepared = True
        return
    preparation.running, preparation.result, preparation.noted_s = True, None, ctx.now_s
    argv = ("muster.data", "--run-dir", str(ctx.state.identity.run_dir))
    ctx.do(StartProgram(Program(PREPARE, argv, reads="lines", env="run", spec=spec)))


def on_prepare_line(ctx: HostContext, line: bytes) -> None:
    """Lines that packages print are ignored."""
    preparation = ctx.state.preparation
    try:
        message = _read_preparation(line)
    except Unreadable:
        return
    if not isinstance(message, Preparing):
        preparation.result = message
        return
    ctx.report(HostPreparing(activity=message.activity, done=message.done, total=message.total))
    if ctx.now_s - preparation.noted_s >= NOTE_S:
        preparation.noted_s = ctx.now_s
        share = f": {message.done / message.total:.0%}" if message.done and message.total else ""
        ctx.note(f"{ctx.state.host}: {message.activity}{share}")


def on_prepare_ended(ctx: HostContext, event: ProgramEnded) -> None:
    preparation, host, code = ctx.state.preparation, ctx.state.host, event.code
    preparation.running, result = False, preparation.result
    if event.failure is not None:
        _fail(ctx, event.failure)
    elif code is not None and code < 0 and preparation.kills < PREPARE_KILLS and ctx.state.leaving.reason is None:
        preparation.kills += 1
        ctx.note(f"data preparation on {host} was ended by signal {-code} and is restarted")
        start_prepare(ctx)
    elif code == 0 and isinstance(result, DataPrepared):
        counts = {"fingerprint": result.fingerprint, "tokens": result.tokens, "sequences": result.sequences}
        ctx.log("data.prepared", {**counts, "cached": result.cached, **result.more})
        preparation.prepared, preparation.failure = True, None
        ctx.keep_failure("data", None)
    elif isinstance(result, DataFailed):
        _fail(ctx, StartFailed(reason=result.error, exit_code=result.exit_code, hint=result.hint))
    else:
        reason = f"data preparation ended with code {code}; see logs/prepare-{host}.log"
        hint = "code -9 without a user's kill is lack of memory" if code == -signal.SIGKILL else None
        _fail(ctx, StartFailed(reason=reason, hint=hint))


def _fail(ctx: HostContext, failure: StartFailed) -> None:
    """Ranks that live (a restarted agent's preparation fails) go on."""
    preparation = ctx.state.preparation
    reported, preparation.failure = preparation.failure, failure
    if failure.exit_code != UsageError.exit_code:
        preparation.retry_s = ctx.now_s + RETRY_S
    if failure == reported:
        return
    if ctx.state.ranks.living():
        ctx.note(f"{failure.reason}: the ranks on {ctx.state.host} go on, it is tried again")
    else:
        ctx.keep_failure("data", failure)


# ---------------------------------------------------------------- preemption notices of the cloud


def on_notice_line(ctx: HostContext, line: bytes) -> str | None:
    """The source of a preemption; of other notices an event is made."""
    try:
        notice = _read_notice(line)
    except Unreadable as error:
        ctx.note(f"a notice of the preemption watcher: {error}")
        return None
    if notice.notice == "preempted":
        return "the metadata server: preempted"
    source = f"the metadata server: {notice.value}"
    ctx.log("termination.notice", {"notice": notice.notice, "source": source, "grace_s": 60.0})
    return None


# ---------------------------------------------------------------- GPU reset


def reset_gpus(ctx: HostContext) -> bool:
    """Whether a reset is still to come. It refuses while any process uses the GPU, so the ranks must be gone."""
    reset = ctx.state.reset
    if reset.ordered:
        reset.gpus, reset.ordered, reset.by_s = reset.ordered, (), ctx.now_s + RESET_LIMIT_S
        argv = ("nvidia-smi", "--gpu-reset", "-i", ",".join(str(gpu) for gpu in reset.gpus))
        ctx.do(StartProgram(Program(RESET, argv, is_tool=True, reads="all", with_stderr=True)))
    return reset.running


def on_reset_ended(ctx: HostContext, event: ProgramEnded) -> None:
    if event.failure is not None:
        _reset(ctx, False, f"no reset: {event.failure.reason}: nvidia-smi")
        return
    if event.code is None:
        _reset(ctx, False, f"nvidia-smi --gpu-reset has not ended within {RESET_LIMIT_S:.0f} s")
        return
    lines = event.output.decode(errors="replace").strip().splitlines()
    _reset(ctx, event.code == 0, (lines[-1] if lines else f"exit code {event.code}")[:200])


def _reset(ctx: HostContext, ok: bool, evidence: str) -> None:
    """What the GPUs report after one that worked is a new incident."""
    reset = ctx.state.reset
    reset.by_s, reset.result = NEVER, ResetResult(ok=ok, evidence=evidence)
    ctx.log("host.reset", {"gpus": list(reset.gpus), "ok": ok, "evidence": evidence})
    if ok:
        ctx.state.hardware.faults.note_reset()
