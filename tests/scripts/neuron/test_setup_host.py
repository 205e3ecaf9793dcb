"""Test scripts/neuron/setup-host.sh on each system. The package managers are stand-ins."""

import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from triton_transformers.settings import ROOT

SCRIPT = ROOT / "scripts/neuron/setup-host.sh"
APT, DNF = "https://apt.repos.neuron.amazonaws.com", "https://yum.repos.neuron.amazonaws.com"
SYSTEMS = {
    "jammy": 'ID=ubuntu\nVERSION_ID="22.04"\nVERSION_CODENAME=jammy\n',
    "noble": 'ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n',
    "amazon": 'ID="amzn"\nVERSION_ID="2023"\n',
}
CHIPS = {"inf1.xlarge": ("inf1", "2.24.*"), "inf2.8xlarge": ("inf2", "2.*"), "trn1n.32xlarge": ("trn1", "2.*")}
# The only real programs on its PATH, so that it cannot install anything.
TOOLS = ("bash", "cat", "grep", "install")
RECORDED = '#!/bin/sh\necho "${0##*/} $*" >>"$CALLS"\n'


@pytest.fixture
def host(tmp_path):
    """Create a machine for the script: a folder of files, and commands that only record their calls."""
    root, bin_, calls = tmp_path / "root", tmp_path / "bin", tmp_path / "calls"
    for folder in ("etc/apt/sources.list.d", "etc/yum.repos.d", "dev", "sys/devices/virtual/dmi/id", "sys/module"):
        (root / folder).mkdir(parents=True)
    bin_.mkdir()
    for tool in TOOLS:
        (bin_ / tool).symlink_to(f"/usr/bin/{tool}")

    def command(name, body=""):
        (bin_ / name).write_text(RECORDED + body)
        (bin_ / name).chmod(0o755)

    for name in ("apt-get", "dnf", "docker"):
        command(name)
    command("uname", "echo 6.8.0-aws\n")
    command("curl", 'for last; do :; done; echo a key >"$last"\n')
    command("dpkg-query", "exit 1\n")
    command("rpm", "exit 1\n")
    command("modinfo", "echo 2.30.2.0\n")
    command("modprobe", ': >"$HOST_ROOT/dev/neuron0"; : >"$HOST_ROOT/dev/neuron1"\n')

    def install_system(system, instance=None):
        (root / "etc/os-release").write_text(SYSTEMS.get(system, system))
        if instance:
            (root / "sys/devices/virtual/dmi/id/product_name").write_text(instance + "\n")

    def setup(*arguments):
        environment = {"PATH": str(bin_), "HOST_ROOT": str(root), "CALLS": str(calls)}
        done = subprocess.run(
            ["/usr/bin/bash", "-s", "--", *arguments],
            input=SCRIPT.read_text(),
            env=environment,
            capture_output=True,
            text=True,
        )
        output = done.stdout.replace(str(root), "").replace("\\", "")
        return SimpleNamespace(code=done.returncode, output=output, error=done.stderr)

    def changes():
        """Return the calls that change a machine."""
        queries = ("uname", "dpkg-query", "rpm", "modinfo")
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line.replace(str(root), "") for line in lines if not line.startswith(queries)]

    def files():
        return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}

    return SimpleNamespace(
        root=root,
        command=command,
        install_system=install_system,
        setup=setup,
        changes=changes,
        files=files,
        calls=calls,
    )


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs")


@pytest.mark.parametrize(("system", "instance"), [*zip(SYSTEMS, CHIPS, strict=True)])
def test_dry_run_prints_the_steps_and_changes_nothing(host, system, instance):
    host.install_system(system, instance)
    before = host.files()
    done = host.setup("--dry-run")
    _, driver = CHIPS[instance]
    repository, separator = (DNF, "-") if system == "amazon" else (f"{APT} {system} main", "=")
    assert repository in done.output
    assert f" aws-neuronx-dkms{separator}{driver} " in done.output
    assert done.output.endswith("+ modprobe neuron\n")
    assert (done.code, done.error, host.changes(), host.files()) == (0, "", [], before)


@as_root
@pytest.mark.parametrize(("system", "instance"), [*zip(SYSTEMS, CHIPS, strict=True)])
def test_run_does_what_the_dry_run_prints(host, system, instance):
    host.install_system(system, instance)
    expected = host.setup("--dry-run").output
    done = host.setup()
    assert (done.code, done.error) == (0, "")
    assert done.output.startswith(expected)
    steps = [line.removeprefix("+ ") for line in expected.splitlines() if line.startswith("+ ")]
    assert host.changes() == [line for line in steps if not line.startswith(("write", "install"))]
    assert "driver 2.30.2.0: /dev/neuron0 /dev/neuron1\n" in done.output
    chip, _ = CHIPS[instance]
    assert done.output.endswith(f"next: make up PROFILE=neuron NEURON_CHIP={chip} NEURON_DEVICES=2\n")
    assert ("a driver without Inf1" in done.output) is (chip == "inf1")


@as_root
@pytest.mark.parametrize("system", ["noble", "amazon"])
def test_second_run_writes_nothing(host, system):
    host.install_system(system, "inf2.xlarge")
    host.setup()
    files = host.files()
    host.calls.unlink()
    done = host.setup()
    assert (done.code, host.files()) == (0, files)
    assert "write" not in done.output
    assert not [line for line in host.changes() if line.startswith("modprobe")]


@pytest.mark.parametrize(("system", "remove"), [("noble", "apt-get remove"), ("amazon", "dnf remove")])
def test_driver_of_neuron_1_is_removed(host, system, remove):
    host.install_system(system, "inf1.xlarge")
    host.command("dpkg-query", "echo 'Status: install ok installed'\n")
    host.command("rpm")
    output = host.setup("--dry-run").output
    assert f"+ {remove} -y aws-neuron-dkms\n" in output
    assert output.index(remove) < output.index("aws-neuronx-dkms")


@pytest.mark.parametrize(("system", "instance", "arguments", "message"), [
    ("noble", "m5.large", [], "this machine (m5.large) is no Inf1, Inf2 or Trn1 instance"),
    ("noble", None, ["inf3"], "unknown argument: inf3"),
    ('ID=ubuntu\nVERSION_ID="20.04"\nPRETTY_NAME="Ubuntu 20.04.6 LTS"\n', None, ["inf2"],
        "Ubuntu 20.04.6 LTS is not supported"),
    ("ID=arch\n", None, ["inf2"], "arch is not supported; use Ubuntu 22.04, Ubuntu 24.04 or Amazon Linux 2023"),
])  # fmt: skip
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_error_is_one_line(host, system, instance, arguments, message, dry_run):
    host.install_system(system, instance)
    done = host.setup(*dry_run, *arguments)
    assert (done.code, done.output, host.changes()) == (1, "", [])
    assert done.error.startswith(f"error: {message}")
    assert done.error.count("\n") == 1


def test_run_without_root_is_an_error():
    """Use a folder outside of pytest's, which other users cannot read."""
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/etc")
        Path(folder, "etc/os-release").write_text(SYSTEMS["noble"])
        done = subprocess.run(
            [*drop, "bash", "-s", "--", "inf2"],
            input=SCRIPT.read_text(),
            env={"PATH": "/usr/bin:/bin", "HOST_ROOT": folder},
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: this installs packages: run it with sudo, or print the steps with --dry-run\n"


@as_root
@pytest.mark.parametrize(("command", "body", "version", "code", "message"), [
    ("modprobe", "", None, 1, "there is no /dev/neuron0: is this an inf2 instance?"),
    ("modprobe", "exit 1\n", None, 1, "the driver is installed, but does not load"),
    ("apt-get", "exit 3\n", None, 3, ""),
    ("modprobe", "", "2.24.13.0", 1, "driver 2.30.2.0 is installed, but 2.24.13.0 still runs"),
])  # fmt: skip
def test_failed_step_ends_the_script(host, command, body, version, code, message):
    host.install_system("noble", "inf2.xlarge")
    host.command(command, body)
    if version:  # an old driver is loaded
        (host.root / "dev/neuron0").touch()
        (host.root / "sys/module/neuron").mkdir()
        (host.root / "sys/module/neuron/version").write_text(f"{version}\n")
    done = host.setup()
    assert (done.code, message in done.error, "next:" in done.output) == (code, True, False)


def test_removed_ubuntu_driver_with_config_files_is_ignored(host):
    host.install_system("noble", "inf1.xlarge")
    host.command("dpkg-query", "echo 'Status: deinstall ok config-files'\n")
    assert "remove" not in host.setup("--dry-run").output


def test_chip_argument_overrides_the_instance(host):
    host.install_system("noble", "inf2.xlarge")
    assert "aws-neuronx-dkms=2.24.*" in host.setup("--dry-run", "inf1").output
