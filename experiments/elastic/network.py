"""What connects a rank to the others through all losses: who is in, and the group of now."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from distlab.lab.cluster.membership import Membership, View
from distlab.lab.cluster.messages import PURPOSE
from distlab.lab.cluster.views import END
from distlab.lab.lab import Lab
from distlab.techniques.elastic.process_group import Regroup

BACK = "back"  # what a rank that was started again asks as


@dataclass
class Net:
    """Of one rank."""

    membership: Membership
    group: Regroup

    def form(self, view: View) -> None:
        """The group of `view`, over the run's store; raises RuntimeError where one of its members is gone."""
        members = view.members
        if gone := [member.rank for member in members if not self.membership.lives(member)]:
            raise RuntimeError(f"ranks {gone} are gone before the group stood")
        name = f"view {view.number} of {' '.join(f'{member.rank}.{member.life}' for member in members)}"
        place = members.index(self.membership.me)
        self.form_of(name, place, len(members), lambda: self.membership.stands(members))

    def form_of(self, name: str, place: int, size: int, stands: Callable[[], bool] = lambda: True) -> None:
        """A group of `size` over the run's store, in which this rank is number `place`."""
        self.group.form(name, place, size, self.membership.cluster.server_at, stands)

    def changed(self) -> None:
        """On the thread of the watch: what ends the group wakes whoever waits in it."""
        self.group.cut()

    def die(self) -> None:
        """Hang up as the kernel does for a process that is killed, and forget all."""
        self.group.leave()
        self.membership.be_reborn()


def open_net(lab: Lab) -> Net:
    membership = lab.hooks.membership
    assert membership is not None, "a mode whose ranks come and go has one"
    bound_s = lab.config.collective_timeout_s
    group = Regroup(lab.hooks.own_ip, membership.cluster.key, bound_s, membership.filenos, PURPOSE)
    net = Net(membership, group)
    membership.on_change = net.changed
    return net


def let_leave(lab: Lab, net: Net) -> None:
    """From here on each rank may be lost, and may come back; all call it together, and who has come back alone."""
    if not net.membership.rejoined:
        lab.exchange.barrier("ranks may leave")
    lab.hooks.let_leave(partial(left, net))
    net.membership.publish()


def left(net: Net, rank: int) -> None:
    """On the thread of the watch: `rank` was lost."""
    if rank in net.membership.view.ranks:
        net.group.cut()


def settle(lab: Lab, net: Net) -> None:
    """All that is left: who is still here is collected for by the rank that serves."""
    view = net.membership.assemble(END, {}, lambda there, reports: {"members": there})  # noqa: ARG005
    assert view is not None
    lab.hooks.move()
