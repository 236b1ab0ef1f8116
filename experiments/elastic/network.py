"""What connects a rank to the others through all losses: lines, a store of its own, who is in, and the group of now."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from distlab.elastic.membership import BEGIN, Member, Membership, View
from distlab.elastic.peer_connections import ENDED, Address, Lines, Message, book_of
from distlab.elastic.process_group import Regroup
from distlab.lab import Lab
from distlab.transport.store import HostedStore, KeyedStore, Prefixed

STORE_S = 20.0
BUSY_S = 5.0
BACK = "back"  # what a rank that was started again asks as


@dataclass
class Net:
    """Of one rank. Every rank keeps a store, so that no rank's death is a special case."""

    lines: Lines
    membership: Membership
    group: Regroup
    store: HostedStore
    settled: bool = False

    def form(self, view: View) -> None:
        """The group of `view`, over the store of its first member; raises RuntimeError where one of them is gone."""
        members = view.members
        if gone := [member.rank for member in members if not self.membership.lives(member)]:
            raise RuntimeError(f"ranks {gone} are gone before the group stood")
        host = self.lines.book[members[0].rank]
        name = f"view {view.number} of {' '.join(f'{member.rank}.{member.life}' for member in members)}"

        def stands() -> bool:
            lives = self.lines.open() | {self.lines.rank: self.lines.life}
            return all(lives.get(each.rank) == each.life and self.membership.lives(each) for each in members)

        self.group.form(name, members.index(self.membership.me), len(members), host, stands)

    # What is done about a rank that has come back; None once the run is over, when nobody is taken in.
    welcome: Callable[[int, Message], None] | None = None

    def heed(self, rank: int, life: int, message: Message) -> None:
        """On the thread of the lines: what ends the group wakes whoever waits in it."""
        if message.get("kind") == "ask" and "opened" in message:
            if self.welcome is None:
                self.lines.send(rank, {"kind": "too late"})
                return
            self.lines.book[rank] = Address(*message["opened"])
            self.membership.parted.discard(rank)
            self.welcome(rank, message)
        ended = message.get("kind") == ENDED and Member(rank, life) in self.membership.view.members
        left = message.get("kind") == "left" and message["number"] == self.membership.view.number
        if ended or left or message.get("kind") in ("call", "given up"):
            self.group.cut()

    def leave(self) -> None:
        """The group is broken: hang up and say so, since gloo does not always tell of it whoever waits in there."""
        self.group.leave()
        self.lines.tell(self.lines.open(), {"kind": "left", "number": self.membership.view.number})

    def part(self, rank: int) -> None:
        """On the thread of the watch: `rank` was given up."""
        self.membership.part(rank)
        if rank in self.membership.view.ranks:
            self.group.cut()

    def hung_up(self) -> set[int]:
        """The ranks to which there is no line; once all is settled who is done hangs up, and that is no death."""
        if self.settled:
            return set()
        return self.membership.world - set(self.lines.open()) - {self.lines.rank}

    def hang_up(self) -> None:
        """As the kernel does for a process that is killed."""
        self.group.leave()
        self.lines.hang_up()
        self.membership.forget()

    def close(self) -> None:
        self.group.leave()
        self.lines.close()

    def come_back(self) -> None:
        """Open a line to each rank that answers: a busy one is waited for longer than it could be silent unparted."""
        self.lines.dial(sorted(self.membership.world - self.membership.parted - {self.lines.rank}), BUSY_S)


def open_net(lab: Lab) -> Net:
    ip, secret, addresses = lab.hooks.own_ip, lab.hooks.secret, lab.hooks.addresses
    lines = Lines(lab.rank, ip, secret, lab.hooks.turned_away)
    store = HostedStore(ip, secret, STORE_S, turned_away=lab.hooks.turned_away)
    membership = Membership(lines, range(lab.world_size), lab.config.collective_timeout_s)
    net = Net(lines, membership, Regroup(ip, secret, lab.config.collective_timeout_s, lines.filenos), store)
    lines.on_news = net.heed
    own = Address(ip, lines.port, store.port)
    if addresses is not None and addresses.rejoined:
        lines.book = book_of(addresses.opened | {lab.rank: list(own)})
    else:
        lines.book = book_of(dict(enumerate(lab.exchange.everyone("the lines' addresses", own))))
        if silent := lines.dial(range(lab.rank), STORE_S):
            raise TimeoutError(f"ranks {silent} did not open a line to rank {lab.rank} within {STORE_S:g} s")
        lab.exchange.barrier("the lines")
    return net


def let_leave(lab: Lab, net: Net) -> None:
    """From here on each rank may be lost, and may come back; all call it together, and who has come back alone, which
    opens lines to those that are there."""
    addresses = lab.hooks.addresses
    if addresses is not None and addresses.rejoined:
        net.come_back()
    else:
        lab.exchange.barrier("ranks may leave")
    lab.hooks.let_leave(net.part, net.hung_up)
    if addresses is not None:
        net.welcome = partial(welcome, lab)
        addresses.publish({rank: list(address) for rank, address in net.lines.book.items()})


def welcome(lab: Lab, rank: int, message: Message) -> None:
    """On the thread of the lines: `rank` has come back, and listens elsewhere."""
    lab.hooks.readmit(message["member"], message["opened"])
    lab.say(f"rank {rank} has come back", "back", all_ranks=True)


def wish_back(lab: Lab, net: Net) -> Message:
    """What a rank that has come back asks for, and where it is now."""
    assert lab.hooks.addresses is not None, "a rank that rejoins has found where the others are"
    member = asdict(lab.hooks.addresses.members[lab.rank])
    return {"as": BACK, "member": member, "opened": list(net.lines.book[lab.rank])}


def settle(lab: Lab, net: Net) -> None:
    """All that is left: who is still here keeps the store of all, the lowest rank of them, and speaks for all."""
    view = net.membership.assemble(f"{BEGIN} the end", {}, lambda there, reports: {"members": there})  # noqa: ARG005
    assert view is not None
    net.welcome, net.settled = None, True
    host = min(view.ranks)
    if lab.hooks.move is not None:
        address = net.lines.book[host]
        store: KeyedStore = net.store
        if host != lab.rank:
            store = KeyedStore(address.ip, address.store_port, lab.hooks.secret, STORE_S)
        lab.hooks.move(Prefixed("the rest", store), host)
