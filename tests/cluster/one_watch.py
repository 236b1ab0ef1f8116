"""A rank that only watches, without torch and without a rendezvous: it does what it is told on its standard input.

Its arguments are a folder, the descriptor of its socket and the ports of all ranks. Words:

    hold S     call C for S seconds without giving the interpreter's lock back
    ready      lay ready a verdict, as rank 0 does before it tells the others
    agree      accept the verdict, and say when it stands
    publish    put in place what was laid ready
    linger S   take S seconds to write what became of a broken run
    raise      fail as one does whose peers have closed their connections
    finish     come to a normal end, and exit with 0
"""

import ctypes
import socket
import sys
import time
from pathlib import Path

from distlab.cluster.authenticated_messages import Dropped, MessageVerifier
from distlab.cluster.heartbeat import Verdict
from distlab.cluster.message_signer import MessageSigner
from distlab.cluster.rendezvous import Cluster
from distlab.cluster.rendezvous_server import Member
from distlab.cluster.shutdown import Succession
from distlab.cluster.watchdog import Watchdog
from distlab.config import Config
from distlab.report.run_folder import Outcome

KEY, TOKEN = b"k" * 32, b"the run."


def say(text: str) -> None:
    print(text, flush=True)


def met(config: Config, own: socket.socket, ports: list[int]) -> Cluster:
    """The cluster as all of its ranks know it."""
    members = {rank: Member(rank, "here", "127.0.0.1", port, 1) for rank, port in enumerate(ports)}
    assert config.rank is not None
    dropped = Dropped(say)
    opener = MessageVerifier(KEY, TOKEN, dropped)
    opener.know_run(TOKEN)
    return Cluster(
        config.rank, len(ports), None, 0, members, own, "dp-1", TOKEN, MessageSigner(KEY), opener, dropped  # type: ignore[arg-type]
    )  # fmt: skip


def main(folder: Path, own: socket.socket, ports: list[int]) -> int:
    config, outcome = Config.read(), Outcome(folder, "token")
    assert config.rank is not None
    rank, lingers = config.rank, [0.0]

    def on_verdict(verdict: Verdict, succession: Succession) -> None:
        say(f"verdict {verdict.exit_code} lost {[lost.rank for lost in verdict.lost]} of {succession.survivors}")
        if succession.turn(outcome.claimed):
            time.sleep(lingers[-1])
            mine = outcome.write({"verdict": "lost", "by": rank})
            succession.tell()
            say(f"wrote {mine}")

    say("up")  # a busy machine takes seconds for the imports, more for one rank than for another
    sys.stdin.readline()
    started = time.monotonic()
    watch = Watchdog(met(config, own, ports), config, say, on_verdict)
    watch.start()
    say(f"watches {watch.post.pulse.process.pid if watch.post.pulse.process else 0}")
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        try:
            if word == "hold":
                ctypes.PyDLL(None).usleep(int(float(value) * 1e6))
            elif word == "ready":
                outcome.lay_ready({"verdict": "pass", "by": rank}, rank)
            elif word == "agree":
                watch.agree()
            elif word == "publish":
                outcome.publish(rank)
                say("published")
            elif word == "linger":
                lingers.append(float(value))
            elif word == "raise":
                raise BrokenPipeError(32, "Broken pipe")
            elif word == "finish":
                watch.finish()
                if 0 in watch.goodbye.outlived:
                    outcome.publish(0)
                say(
                    f"woke {watch.woken} times in {time.monotonic() - started:.3f} s and sent {watch.post.sent_bytes} B"
                )
                return 0
        except Exception as error:
            watch.fail(error)
        say(f"did {word}")
    return 9


if __name__ == "__main__":
    udp = socket.socket(fileno=int(sys.argv[2]))
    sys.exit(main(Path(sys.argv[1]), udp, [int(port) for port in sys.argv[3:]]))
