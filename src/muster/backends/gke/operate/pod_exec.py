"""The run as its own pods see it: the supervisor's answers, the ranks' logs, the events. Over a command in a pod."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from muster.backends import code_bundle
from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.operate import locate
from muster.backends.gke.operate.exec_stream import Target, run
from muster.backends.log_forwarder import writer_of
from muster.config.spec import RunSpec
from muster.core.errors import BackendError, MusterError
from muster.core.typed_json import JsonObject, Unreadable, children, text, texts
from muster.core.types import LogChunk
from muster.protocol.client import SupervisorStatus
from muster.protocol.codec import encode, reader_of
from muster.protocol.pipes import FROM_POD, AskInPod, FileParts, Folder, PodError, ReadFolder, ToPod

Pods = Sequence[JsonObject]

RUN_DIR = "--run-dir"


def ask(
    cluster: Cluster,
    pods: Pods,
    question: AskInPod,
    run_id: str,
    resolved: str | None = None,
    *,
    holder: str | None = None,
    publish: Callable[[str, bytes | None], None] | None = None,
) -> SupervisorStatus:
    """The supervisor's answer, by the program in its pod; ``holder``: address of the one that holds the run.

    ``resolved`` replaces the run file before the question; the user's code goes along as it is now. ``publish`` puts
    both where the other pods find them.
    Raises BackendError where that pod does not run, or the supervisor does not answer.
    """
    target = locate.supervisor(pods, holder)
    if target is None:
        raise BackendError(f"the supervisor of {run_id} has no running pod", hint=f"muster status {run_id}")
    if resolved is not None:
        pod = _named(pods, target.pod)
        shipped, code = code_bundle.pack(RunSpec.model_validate_json(resolved), run_dir_of(pod))
        packed = base64.b64encode(code).decode() if code is not None else None
        question = replace(question, resolved=shipped.model_dump_json(indent=1) + "\n", code=packed)
        if publish is not None:
            publish(str(question.resolved), code)
    answer = _question(cluster, target, pods, question)
    if not isinstance(answer, SupervisorStatus):
        raise BackendError(f"{target.pod} answered a question with files")
    return answer


def logs(cluster: Cluster, pods: Pods, after: Mapping[str, int]) -> Iterator[LogChunk]:
    """What the run's processes wrote beyond ``after``.

    Ranks' output comes from the run's folder or, where no pod can be asked, from the copy in their pod's own output.
    """
    ranks = list(rank_logs(cluster, pods, after))
    yield from pod_logs(cluster, pods, after, copies=not locate.running(pods))
    yield from ranks


def pod_logs(cluster: Cluster, pods: Pods, after: Mapping[str, int], *, copies: bool = True) -> Iterator[LogChunk]:
    """Output of each pod's own container beyond ``after``; what it holds of its ranks' apart, or left out."""
    for pod in sorted(pods, key=lambda pod: text(pod, "metadata", "creationTimestamp")):
        task, container = locate.task(pod)
        namespace, name = text(pod, "metadata", "namespace"), text(pod, "metadata", "name")
        data = cluster.pod_log(namespace, name, container).encode()
        position = after.get(task, 0)
        # A replaced pod starts a log of its own: what is shorter than what was read is read from its beginning.
        start = position if position <= len(data) else 0
        written: dict[str, str] = {}
        for line in data[start:].decode(errors="replace").splitlines(keepends=True):
            writer, part = writer_of(line, task)
            written[writer] = written.get(writer, "") + part
        for writer, part in written.items():
            if writer == task or copies:
                yield LogChunk(task=writer, text=part, next_offset=len(data))


def rank_logs(cluster: Cluster, pods: Pods, after: Mapping[str, int]) -> Iterator[LogChunk]:
    """What the run folder's log files (one for each rank and attempt) hold beyond ``after``, while a pod runs."""
    positions = {f"{task}.log": offset for task, offset in after.items()}
    decoders: dict[str, codecs.IncrementalDecoder] = {}
    for name, start, data in _files(cluster, pods, "logs", positions):
        # A part may end within a character; the next one begins where this ended.
        decoder = decoders.setdefault(name, codecs.getincrementaldecoder("utf-8")(errors="replace"))
        new = decoder.decode(data)
        end = start + len(data) - len(decoder.getstate()[0])
        if new:
            yield LogChunk(task=name.removesuffix(".log"), text=new, next_offset=end)


def mirror(cluster: Cluster, pods: Pods, folder: Path) -> int:
    """Bring the events that the pods wrote to ``folder``; returns the number of new bytes.

    A file that this machine wrote itself is no pod's, so the two never meet: the client's events are ``client.*``.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = {path.name: path.stat().st_size for path in folder.glob("*.jsonl") if not path.name.startswith("client.")}
    fresh = 0
    for name, start, data in _files(cluster, pods, "events", held):
        if "/" in name or name.startswith((".", "client.")):
            continue
        with open(folder / name, "r+b" if (folder / name).exists() else "wb") as file:
            file.truncate(start)
            file.seek(start)
            file.write(data)
        fresh += len(data)
    return fresh


def _files(cluster: Cluster, pods: Pods, folder: Folder, held: Mapping[str, int]) -> Iterator[tuple[str, int, bytes]]:
    """(name, offset, bytes) of what is new, until nothing is; nothing where no pod can be spoken to."""
    target = locate.supervisor(pods) or next(iter(locate.running(pods).values()), None)
    positions = dict(held)
    while target is not None:
        try:
            answer = _question(cluster, target, pods, ReadFolder(folder=folder, after=positions))
        except MusterError:
            return  # the pod ended between the look and the question
        parts = answer.files if isinstance(answer, FileParts) else ()
        for part in parts:
            data = base64.b64decode(part.data)
            positions[part.name] = part.offset + len(data)
            yield part.name, part.offset, data
        if sum(len(part.data) for part in parts) < ENOUGH:
            return


ENOUGH = 4 * 1024 * 1024
"""An answer smaller than this was the whole of it."""


def _question(cluster: Cluster, target: Target, pods: Pods, question: ToPod) -> SupervisorStatus | FileParts:
    """Raises BackendError with the pod's own words where it cannot answer."""
    pod = _named(pods, target.pod)
    argv = ["python", "-m", "muster.app.remote_entrypoint", RUN_DIR, run_dir_of(pod)]
    printed = run(cluster, target, argv, line=encode(question).decode())
    try:
        answer = reader_of(FROM_POD)(printed.splitlines()[-1])
    except (Unreadable, IndexError) as error:
        raise BackendError(f"{target.pod} answered {printed[-200:]!r}", hint="is its image of this version?") from error
    if isinstance(answer, PodError):
        raise BackendError(answer.error, hint=answer.hint)
    return answer


def _named(pods: Pods, name: str) -> JsonObject:
    return next(pod for pod in pods if text(pod, "metadata", "name") == name)


def run_dir_of(pod: JsonObject) -> str:
    """As the pod's own command names it: what a chart or another hand chose is found too."""
    for container in children(pod, "spec", "containers"):
        argv = texts(container, "command")
        if RUN_DIR in argv[:-1]:
            return str(argv[argv.index(RUN_DIR) + 1])
    name = text(pod, "metadata", "name")
    raise BackendError(f"pod {name} names no run folder", hint="the pod was started by another version of Muster")
