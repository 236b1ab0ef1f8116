"""The network of one rank through all losses: the members, and the current process group."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from distlab.lab.cluster.membership import Membership, View
from distlab.lab.cluster.messages import PURPOSE
from distlab.lab.cluster.views import END
from distlab.lab.lab import Lab
from distlab.techniques.elastic.process_group import Regroup

BACK = "back"  # the join request of a restarted process


@dataclass
class Net:
    """The membership and the process group of one rank."""

    membership: Membership
    group: Regroup

    def form(self, view: View) -> None:
        """Form the group of `view`, over the run's store; raises RuntimeError if one of its members was lost."""
        members = view.members
        if lost := [member.rank for member in members if not self.membership.lives(member)]:
            raise RuntimeError(f"ranks {lost} were lost before the group was created")
        name = f"view {view.number} of {' '.join(f'{member.rank}.{member.life}' for member in members)}"
        place = members.index(self.membership.me)
        self.form_of(name, place, len(members), lambda: self.membership.is_intact(members))

    def form_of(self, name: str, place: int, size: int, is_intact: Callable[[], bool] = lambda: True) -> None:
        """Form a group of `size` over the run's store, with this rank as number `place`."""
        self.group.form(name, place, size, self.membership.cluster.server_at, is_intact)

    def changed(self) -> None:
        """Cut the group, on the watch's thread, which wakes all waits in it."""
        self.group.cut()

    def die(self) -> None:
        """Disconnect as the kernel does for a killed process, and drop all state."""
        self.group.leave()
        self.membership.restart_as_new()


def open_net(lab: Lab) -> Net:
    membership = lab.hooks.membership
    assert membership is not None, "an elastic mode has one"
    bound_s = lab.config.collective_timeout_s
    group = Regroup(lab.hooks.own_ip, membership.cluster.key, bound_s, membership.filenos, PURPOSE)
    net = Net(membership, group)
    membership.on_change = net.changed
    return net


def let_leave(lab: Lab, net: Net) -> None:
    """Allow ranks to be lost and to return from now on; all call it together, a returned rank alone."""
    if not net.membership.rejoined:
        lab.exchange.barrier("ranks may leave")
    lab.hooks.let_leave(partial(on_loss, net))
    net.membership.publish()


def on_loss(net: Net, rank: int) -> None:
    """Handle the loss of `rank`, on the watch's thread."""
    if rank in net.membership.view.ranks:
        net.group.cut()


def settle(lab: Lab, net: Net) -> None:
    """Finish: the serving rank collects from the ranks that are still present."""
    view = net.membership.assemble(END, {}, lambda present, reports: {"members": present})  # noqa: ARG005
    assert view is not None
    lab.hooks.move()
