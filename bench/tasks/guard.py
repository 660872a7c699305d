"""Work in processes of its own, which may crash or hang: forked, so that nothing is imported anew."""

import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from bench.tasks.problem import Failed

CONTEXT = multiprocessing.get_context("fork")


def brief(error: BaseException) -> str:
    """Return the first line of an error, folders left out: they are of one machine."""
    line = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    line = re.sub(r"(?<![\w.])(/[\w.+-]+)+/", "", line)
    line = f"{type(error).__name__}: {line}".rstrip(": ")
    return line if len(line) <= 120 else line[:117] + "..."


class Broken(Exception):
    """The work raised, died or hung; the text says which."""


class Job:
    """A process at work.

    Args:
        work: what to do; its result is pickled.
        own_group: whether it leads a process group, which ends with it.
        cpu: seconds of a core that it and every process that it starts may take.
    """

    def __init__(self, work: Callable[[], Any], own_group: bool = False, cpu: int | None = None) -> None:
        self.receiver, sender = CONTEXT.Pipe(duplex=False)
        self.own_group, self.cpu = own_group, cpu
        self.process = CONTEXT.Process(target=self._run, args=(work, sender))
        self.process.start()
        sender.close()

    def _run(self, work: Callable[[], Any], sender: Connection) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        if self.own_group:
            os.setpgid(0, 0)
        if self.cpu is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (self.cpu, self.cpu + 1))
        try:
            sender.send((None, work()))
        except Failed as failed:
            sender.send((Failed, str(failed)))
        except KeyboardInterrupt:
            pass
        except Broken as broken:
            sender.send((Broken, str(broken)))
        except BaseException as error:  # another package may fail in any way
            sender.send((Broken, brief(error)))

    def result(self, seconds: float | None = None) -> Any:
        """Return what the work returned.

        Raises:
            Failed: the work raised it.
            Broken: it raised something else, died, or ran for longer.
        """
        if not self.receiver.poll(seconds):
            raise Broken(f"still running after {seconds:g} s")
        try:
            raised, value = self.receiver.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode == -signal.SIGXCPU:
                raise Broken(f"still running after {self.cpu} s of a core") from None
            raise Broken(f"process ended with exit status {self.process.exitcode}") from None
        if raised is not None:
            raise raised(value)
        return value

    def end(self) -> None:
        """End the process, with its group if it leads one, and let it end what it has started if not."""
        assert self.process.pid is not None
        if self.own_group:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # nobody is left
        elif self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)
            self.process.join(5)
        self.process.kill()
        self.process.join()
        self.receiver.close()


def guarded(work: Callable[[], Any], seconds: float | None = None, cpu: int | None = None) -> Any:
    """Return what work returns in a process; with ``seconds``, whatever it started ends with it.

    Raises:
        Failed: the work raised it.
        Broken: it raised something else, died, ran for longer than ``seconds`` or took more than ``cpu`` of a core.
    """
    job = Job(work, own_group=seconds is not None, cpu=cpu)
    try:
        return job.result(seconds)
    finally:
        job.end()


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Return what several return that run at the same time.

    Raises:
        Failed, Broken: as the first that fails does.
    """
    jobs = [Job(work) for work in works]
    try:
        found: dict[Connection, Any] = {}
        while len(found) < len(jobs):
            for ready in wait([job.receiver for job in jobs if job.receiver not in found]):
                found[ready] = next(job for job in jobs if job.receiver is ready).result()  # type: ignore[index]
        return [found[job.receiver] for job in jobs]
    finally:
        for job in jobs:
            job.end()
