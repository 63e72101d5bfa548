"""Worker processes that are lost: it costs their work one more try, and nobody else anything."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import pytest

from plancache.crew import Crew, Job, Lost, completed, usable_cpus
from tests.conftest import ROOT


def work(task):
    """`task` is (what, file): what to do, and a file that the first try leaves."""
    what, file = task
    if what == "dies" or (what == "dies once" and not Path(file).exists()):
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises once" and not Path(file).exists():
        Path(file).touch()
        raise OSError("the node is gone")
    return what, os.getpid()


def run(executor, whats, tmp_path, window=2, parts=()):
    jobs = [Job((what, str(tmp_path / f"{number}")), number) for number, what in enumerate(whats)]
    if parts:
        group = Job(("dies", str(tmp_path / "group")), "group", jobs)
        jobs = [group]
    with executor:
        return {job.about: answer for job, answer in completed(jobs, work, executor, window)}


def test_a_lost_worker_costs_its_case_one_more_try(tmp_path):
    answers = run(Crew(2), ["fine", "dies once", "fine", "fine"], tmp_path)
    assert [answers[number][0] for number in range(4)] == ["fine", "dies once", "fine", "fine"]


def test_a_case_that_kills_its_worker_twice_is_lost_and_the_others_are_not(tmp_path):
    answers = run(Crew(2), ["fine", "dies", "fine", "dies", "fine"], tmp_path)
    assert [isinstance(answers[number], Lost) for number in range(5)] == [False, True, False, True, False]
    assert "died, twice" in str(answers[1])


def test_a_lost_group_is_taken_apart_so_that_only_the_killer_is_lost(tmp_path):
    answers = run(Crew(2), ["fine", "dies", "fine"], tmp_path, parts=True)
    assert set(answers) == {0, 1, 2}
    assert [isinstance(answers[number], Lost) for number in range(3)] == [False, True, False]


def test_workers_that_nobody_waits_for_end_at_once_whatever_they_are_doing(tmp_path):
    crew = Crew(1)
    _, worker = crew.submit(work, ("fine", "")).result(timeout=60)
    busy = crew.submit(time.sleep, 600)
    while not busy.running():
        time.sleep(0.01)
    crew.shutdown(wait=False, cancel_futures=True)
    assert isinstance(busy.exception(timeout=60), BrokenProcessPool)
    deadline = time.monotonic() + 60
    while _state(worker) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_more_processes_than_there_is_work(tmp_path):
    answers = run(Crew(8), ["fine"] * 4, tmp_path, window=1)
    assert len({pid for _, pid in answers.values()}) == 1


def test_a_failure_of_somebody_elses_executor_costs_one_more_try_too(tmp_path):
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    assert run(pool, ["raises once"], tmp_path)[0][0] == "raises once"


def test_what_a_broken_executor_of_somebody_else_does_not_take_is_lost_and_not_forgotten(tmp_path):
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    answers = run(pool, ["dies", "fine", "fine"], tmp_path, window=1)
    assert [isinstance(answers[number], Lost) for number in range(3)] == [True] * 3
    # What was never begun with is not said to have killed its worker.
    assert str(answers[2]).startswith("the executor takes no more work: BrokenProcessPool: ")


class Holding(Executor):
    """Answers only when it is full; notes how many were under way."""

    def __init__(self, size):
        self.size, self.held, self.most = size, [], 0

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_running_or_notify_cancel()
        self.held.append(future)
        self.most = max(self.most, len(self.held))
        if len(self.held) == self.size:
            for one in self.held:
                one.set_result("done")
            self.held = []
        return future


def test_no_more_are_under_way_than_the_window_and_items_are_taken_only_as_there_is_room():
    taken = []

    def items():
        for number in range(30):
            taken.append(number)
            yield Job(number, number)

    executor, answered = Holding(5), 0
    for _ in completed(items(), work, executor, 5):
        answered += 1
        assert len(taken) - answered <= 5
    assert (answered, executor.most) == (30, 5)


PARENT = """
import os, sys, time
from concurrent.futures import wait
from plancache.crew import Crew
if __name__ == "__main__":
    crew = Crew(2)
    futures = [crew.submit(time.sleep, 0.01), crew.submit(time.sleep, 0.01)]
    wait(futures)
    pids = [pid for pool in crew._pools for pid in pool._processes]
    print(*pids, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_killed_parent(tmp_path, number):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(number)
    parent.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_processors_that_this_process_may_not_use_do_not_count():
    source = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
    source += "from plancache.crew import usable_cpus; print(usable_cpus())"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "1\n"
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))


MANY = """
import os, resource, sys
from plancache.crew import Crew
if __name__ == "__main__":
    soft, hard, jobs = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with Crew(jobs) as crew:
        futures = [crew.submit(os.getpid) for _ in range(2 * jobs)]
        print(len({future.result() for future in futures}))
"""


@pytest.mark.parametrize(("hard", "most"), [(2000, 8), (60, 7)], ids=["may be raised", "stands"])
def test_a_limit_on_open_files_costs_workers_and_no_work(tmp_path, hard, most):
    script = tmp_path / "many.py"
    script.write_text(MANY)
    command = [sys.executable, script, "60", str(hard), "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= most
    assert hard == 60 or int(done.stdout) == 8
