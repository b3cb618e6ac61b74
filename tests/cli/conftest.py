import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from shells import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in shell.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
