"""The output of all pods of a job as one stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from torsh_distributed.clusters.kubernetes.api_server import ApiServer
from torsh_distributed.clusters.kubernetes.job_state import pod_order
from torsh_distributed.clusters.kubernetes.pod_template import Manifest
from torsh_distributed.errors import TorshError

_LOOK_S = 1.0
"""How often new pods are looked for while nothing is said."""

FindPods = Callable[[], list[Manifest]]


def finished_logs(server: ApiServer, namespace: str, find_pods: FindPods) -> Iterator[str]:
    """What the pods have said so far, node by node."""
    for pod in sorted(find_pods(), key=pod_order):
        if _has_started(pod):
            yield from server.log_lines(namespace, pod["metadata"]["name"], follow=False)


def followed_logs(
    server: ApiServer, namespace: str, find_pods: FindPods, *, is_over: Callable[[], bool]
) -> Iterator[str]:
    """What the pods say, as they say it, until the job is over and every pod has said its last word."""
    said: queue.Queue[str | TorshError | None] = queue.Queue()
    readers: dict[str, threading.Thread] = {}
    num_open = 0

    def read(name: str) -> None:
        try:
            for line in server.log_lines(namespace, name, follow=True):
                said.put(line)
        except TorshError as error:
            said.put(error)
        said.put(None)

    while True:
        was_over = is_over()
        for pod in sorted(find_pods(), key=pod_order):
            name = pod["metadata"]["name"]
            if name not in readers and _has_started(pod):
                readers[name] = threading.Thread(target=read, args=(name,), name=f"torsh-log-{name}", daemon=True)
                readers[name].start()
                num_open += 1
        if was_over and not num_open:
            return
        try:
            while True:
                word = said.get(timeout=_LOOK_S)
                if word is None:
                    num_open -= 1
                    break  # a pod has ended: another may follow it, or the job is over
                yield word if isinstance(word, str) else f"torsh: {word.message}"
        except queue.Empty:
            continue


def _has_started(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
