"""The files of deploy/, each checked with the program that would read it."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from serving import Server
from tinkex.server.fleet.plan import read_fleet_file
from tinkex.server.process_end import REPLACED_STATUS
from waiting import until

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("ku*/*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KUBERNETES = "1.32"
#: The fields of KubeRay's own types that are used here, from its API reference (v1.6).
RAY_FIELDS = {
    "RayCluster": {"rayVersion", "authOptions", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}  # fmt: skip


def documents(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def check(manifest: dict) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path):
    for manifest in documents(path):
        if manifest["kind"] != "RayCluster":
            check(manifest)
            continue
        spec = manifest["spec"]
        assert set(spec) <= RAY_FIELDS["RayCluster"]
        for kind in ("headGroupSpec", "workerGroupSpecs"):
            for group in [spec[kind]] if kind == "headGroupSpec" else spec[kind]:
                assert set(group) <= RAY_FIELDS[kind]
                assert all(isinstance(value, str) for value in group["rayStartParams"].values())
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
                check({**pod, "spec": group["template"]["spec"]})


def test_a_manifest_with_a_wrong_field_is_found():
    web = documents(DEPLOY / "kubernetes" / "web.yaml")[0]
    web["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        check(web)


def test_manifests_have_the_style_of_yamllint():
    rules = "{extends: default, rules: {line-length: {max: 110}, braces: {max-spaces-inside: 0}}}"
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "-d", rules, *MANIFESTS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_services_and_policies_select_pods_that_exist():
    labels = []
    selectors = []
    for manifest in [each for path in MANIFESTS for each in documents(path)]:
        spec = manifest.get("spec", {})
        if "template" in spec:
            labels.append(spec["template"]["metadata"]["labels"])
            assert spec["selector"]["matchLabels"] == labels[-1]
        elif manifest["kind"] == "Service":
            selectors.append(spec["selector"])
        elif manifest["kind"] == "NetworkPolicy":
            selectors.append(spec["podSelector"]["matchLabels"])
        elif manifest["kind"] == "RayCluster":
            # KubeRay sets this label.
            labels.append({"ray.io/cluster": manifest["metadata"]["name"]})
    assert len(selectors) == 5
    assert all(selector in labels for selector in selectors)


def test_ray_needs_a_token_has_no_dashboard_and_gets_no_secret_of_the_database():
    cluster = next(
        each
        for each in documents(DEPLOY / "kuberay" / "raycluster.yaml")
        if each["kind"] == "RayCluster"
    )["spec"]
    assert cluster["authOptions"] == {"mode": "token"}
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["include-dashboard"] == "false"
    assert "envFrom" not in head["template"]["spec"]["containers"][0]
    for unit in UNITS:
        text = unit.read_text()
        if "bin/ray start" in text:
            assert "Environment=RAY_AUTH_MODE=token" in text
            assert "IPAddressDeny=any" in text
        if "--head" in text:
            assert "--include-dashboard=false" in text


def test_a_worker_whose_name_another_process_has_is_not_started_again():
    unit = (DEPLOY / "systemd" / "tinkex-worker@.service").read_text()
    assert f"\nRestartPreventExitStatus={REPLACED_STATUS}\n" in unit


def test_the_fleet_files_can_be_read(tmp_path):
    assert read_fleet_file(DEPLOY / "systemd" / "fleet.toml")[0].replicas == 4
    config = documents(DEPLOY / "kuberay" / "raycluster.yaml")[0]
    (tmp_path / "fleet.toml").write_text(config["data"]["fleet.toml"])
    assert read_fleet_file(tmp_path / "fleet.toml")


def test_the_commands_and_options_of_all_files_exist():
    text = "\n".join(path.read_text() for path in [*UNITS, *MANIFESTS])
    used = set(re.findall(r"tinkex(?:/bin/tinkex)?,? (web|worker|fleet)\b,?([^\n\]&]*)", text))
    assert {command for command, _ in used} == {"web", "worker", "fleet"}
    for command, rest in used:
        arguments = [command, "up"] if command == "fleet" else [command]
        done = subprocess.run(
            [sys.executable, "-m", "tinkex.cli", *arguments, "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in done.stdout, f"tinkex {command} has no {option}"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_units_are_accepted_by_systemd(tmp_path):
    # The programs that units start must exist.
    (tmp_path / "bin").mkdir()
    for program in ("tinkex", "ray"):
        (tmp_path / "bin" / program).symlink_to("/bin/true")
    names = []
    for unit in UNITS:
        name = unit.name.replace("@.", "@1.")
        text = unit.read_text().replace("/opt/tinkex/bin", str(tmp_path / "bin"))
        (tmp_path / name).write_text(text)
        names.append(tmp_path / name)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    # Warnings of other units of this machine do not count.
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "tinkex" in line]
    assert not said
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("nginx is not installed (Debian: apt install nginx-light)")
    return found


@pytest.mark.timeout(180)
def test_nginx_passes_requests_to_a_server_and_hides_its_metrics(nginx, server: Server, tmp_path):
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost "
        f"-keyout {tmp_path}/tls.key -out {tmp_path}/tls.crt",
        shell=True,
        check=True,
        capture_output=True,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    backend = server.url.removeprefix("http://")
    text = (DEPLOY / "nginx" / "tinkex.conf").read_text()
    site = (
        text.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        .replace("/etc/tinkex", str(tmp_path))
        .replace("127.0.0.1:8001", backend)
        # Nobody listens there: the balancer takes the other one.
        .replace("127.0.0.1:8002", "127.0.0.1:9")
    )
    temporary = "\n".join(
        f"{kind}_temp_path {tmp_path}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off;\n{temporary}\n{site} }}\n"
    )
    command = [nginx, "-c", f"{tmp_path}/nginx.conf", "-p", str(tmp_path)]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr

    trusting = ssl.create_default_context(cafile=f"{tmp_path}/tls.crt")
    trusting.check_hostname = False

    def status(path: str) -> int | None:
        try:
            # The example's host is not this machine, and a server without keys accepts only that.
            asked = urllib.request.Request(
                f"https://127.0.0.1:{port}{path}", headers={"Host": "localhost"}
            )
            with urllib.request.urlopen(asked, context=trusting, timeout=10) as got:
                return got.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    process = subprocess.Popen(command)
    try:
        until(lambda: status("/readyz") == 200)
        # Round robin: each process is asked in turn, and the missing one is skipped.
        assert [status("/api/v1/healthz") for _ in range(4)] == [200] * 4
        assert status("/metrics") == 404
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)
