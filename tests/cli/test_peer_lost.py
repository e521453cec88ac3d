"""A rank whose peer has gone ends with an error of its own, which is no bug of lpconv."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

from lpconv.errors import PeerLostError
from tests.cli import peer_lost_worker
from tests.helpers.ranks import on_ranks


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_a_lost_peer_has_an_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProcessExitedException) as caught:
        on_ranks(2, peer_lost_worker.lose_a_peer, tmp_path)
    assert caught.value.exit_code == PeerLostError.exit_code
    assert "bug" not in capfd.readouterr().err
