"""What `baton` does around its commands."""

from baton.cli.cluster import drain
from baton.cli.main import main


def test_ctrl_c_is_a_line(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(drain, "run", interrupt)
    assert main(["drain", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "baton drain: interrupted\n"
