r"""Equality of LaTeX expressions by `math-verify`, in a child process that cannot hang the caller.

`math-verify` limits its time with signals, which work only in a process's main thread, and computer algebra
can run for ever on a line such as `9^{9^{9}}`. So it runs in a child of its own: the child lets the kernel
end it after `cpu_seconds` of processor time (the timer's default action needs no Python), and the caller, in
whatever thread, reads the end of the pipe, counts the pair as unequal and starts a new child when it needs
one. Used by `math_equality.py` for the few answers that are not plain numbers; the child is started at the
first of them. Run as `python -m citer_ray.symbolic_judge CPU_SECONDS` this module is the child.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from citer_ray.errors import CiterError

logger = logging.getLogger(__name__)

CPU_SECONDS = 3.0  # a usual comparison takes 0.01 to 0.2
READY, EQUAL, UNEQUAL = "ready", "equal", "unequal"
MEMORY_BYTES = 4 * 2**30


class SymbolicJudge:
    """Compares LaTeX expressions, one pair at a time; safe to share between threads, also after a fork."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._registered = False

    def equal(self, stated: str, answer: str) -> bool:
        """Whether two expressions (without delimiters) are equal; False if that takes longer than the limit.

        Raises:
            CiterError: The child cannot start, because `math-verify` is not installed, say.
        """
        request = json.dumps([stated, answer])
        with self._lock:
            process = self._running()
            reply = _ask(process, request)
            if not reply:
                self._discard()
                logger.warning("comparing %r with %r took too long: counted as unequal", stated, answer)
        return reply == EQUAL

    def close(self) -> None:
        """Ends the child; the next comparison starts a new one."""
        with self._lock:
            self._discard()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._discard()
            self._register()
            self._process = _start(self._cpu_seconds)
        return self._process

    def _register(self) -> None:
        if not self._registered:
            self._registered = True
            atexit.register(self.close)
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked process the child and the lock are the parent's."""
        self._lock = threading.Lock()
        self._process = None

    def _discard(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _start(cpu_seconds: float) -> subprocess.Popen[str]:
    paths = [path or str(Path.cwd()) for path in sys.path]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "citer_ray.symbolic_judge", str(cpu_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if process.stdout is None or process.stdout.readline().strip() != READY:
        process.kill()
        process.wait()
        raise CiterError(
            "the comparison of LaTeX answers cannot start: is `math-verify` installed "
            f"(`{sys.executable} -c 'import math_verify'`)?"
        )
    return process


def _ask(process: subprocess.Popen[str], request: str) -> str:
    """The child's reply; empty if it ended."""
    if process.stdin is None or process.stdout is None:
        return ""
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()
    except OSError:
        return ""


def _serve(cpu_seconds: float) -> None:
    """The child's loop: a pair in, a verdict out, until the caller's end of the pipe closes."""
    import resource
    import signal

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    import math_verify

    logging.disable(logging.CRITICAL)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (OSError, ValueError):  # not every system lets a process lower it; time is limited all the same
        logger.debug("no memory limit for the judge")
    replies.write(READY + "\n")
    replies.flush()
    for line in sys.stdin:
        stated, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            gold, target = (math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (answer, stated))
            verdict = bool(gold and target and math_verify.verify(gold, target, timeout_seconds=None))
        except Exception:  # noqa: BLE001  (computer algebra fails in many ways on odd text: unequal)
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write((EQUAL if verdict else UNEQUAL) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
