"""Neighbours that are made up: how long what a rank sends, and has posted, is held."""

import pytest
import torch

from distlab.experiments.mesh.single_rank_run import AHEAD, FromNowhere
from distlab.pipeline_parallel.schedules import one_forward_one_backward


@pytest.mark.parametrize(("copies", "kept"), [(False, 2), (True, 0)])
def test_an_activation_stays_until_its_gradient_comes_where_nobody_copies_it(copies: bool, kept: int) -> None:
    actions = one_forward_one_backward(2, 3)[0]  # of the first of two stages
    nowhere = FromNowhere((4,), torch.zeros(1), 2, copies=copies)
    nowhere.begin(actions, [2, 2, 1])
    assert [tensor.shape for tensor in nowhere.posted] == [(2, 4)] * AHEAD
    most = 0
    for action in actions:
        if action.kind == "backward":
            assert nowhere.take(action).shape == ((1 if action.microbatch == 2 else 2), 4)
        if action.kind == "forward":
            nowhere.give(action, torch.ones(2, 4))
        most = max(most, len(nowhere.sent))
    assert most == kept
    assert not nowhere.posted


def test_a_gradient_stays_until_the_step_ends() -> None:
    actions = one_forward_one_backward(2, 3)[1]  # of the last
    nowhere = FromNowhere((4,), torch.zeros(1), 2, copies=False)
    nowhere.begin(actions, [2, 2, 1])
    for action in actions:
        if action.kind == "forward":
            nowhere.take(action)
        nowhere.give(action, torch.ones(2, 4))
    assert len(nowhere.sent) == 3
    nowhere.finish()
    assert not nowhere.sent
