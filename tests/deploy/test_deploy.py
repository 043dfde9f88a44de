"""The files of deploy/, each checked with the program that would read it."""

import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from dataclasses import fields
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ports import free_port
from serving import Server
from tinkex.server.fleet.plan import read_fleet_file
from tinkex.server.process_end import REPLACED_STATUS
from tinkex.server.settings import Settings
from tinkex.server.supervisor import KILL_GRACE_S
from waiting import until

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("ku*/*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
VERSION = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["version"]
#: The highest exposure that `systemd-analyze security` may find in the unit that serves alone; it
#: counts from 0 to 10.
MAX_EXPOSURE = 2.0
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
        [sys.executable, "-m", "yamllint", "--strict", "-d", rules, *MANIFESTS, *COMPOSE],
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
    text = "\n".join(path.read_text() for path in [*UNITS, *MANIFESTS, *COMPOSE])
    pattern = r"(?:bin/|\[| )tinkex,? (serve|web|worker|fleet|key create)\b,?([^\n\]&]*)"
    used = set(re.findall(pattern, text))
    assert {command for command, _ in used} == {"serve", "web", "worker", "fleet", "key create"}
    for command, rest in used:
        arguments = [*command.split(), "up"] if command == "fleet" else command.split()
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


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_the_unit_of_a_server_may_do_little() -> None:
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={MAX_EXPOSURE * 10:.0f}",
    ]
    unit = DEPLOY / "systemd" / "tinkex.service"
    done = subprocess.run([*command, unit], capture_output=True, text=True, check=False)
    assert "Overall exposure level for tinkex.service" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout


def test_the_unit_of_a_server_waits_until_it_has_stopped() -> None:
    unit = (DEPLOY / "systemd" / "tinkex.service").read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert float(stop_s) > Settings.drain_s + KILL_GRACE_S
    settings = (DEPLOY / "systemd" / "serve.env").read_text()
    env = dict(re.findall(r"^(\w+)=(.*)$", settings, re.MULTILINE))
    assert Settings.from_sources({}, env).models == ("HuggingFaceTB/SmolLM2-135M-Instruct",)


# -- the image and compose files -------------------------------------------------------------------


def test_the_dockerfile_has_no_finding_of_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_image_is_built_from_what_is_not_ignored() -> None:
    needed = set[str]()
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            needed.update(line.split()[1:-1])
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert needed == {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert all((DEPLOY.parent / name).exists() for name in needed)


def test_images_have_the_version_of_the_package() -> None:
    files = [*MANIFESTS, *COMPOSE, DEPLOY / "Dockerfile"]
    tags = {tag for file in files for tag in re.findall(r"tinkex:(\d\S*)", file.read_text())}
    assert tags == {VERSION, f"{VERSION}-cpu"}


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_follow_the_schema_of_compose(path: Path) -> None:
    assert compose_problems(path) == ""


def test_a_compose_file_with_a_wrong_field_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DEPLOY / "compose.yaml").read_text().replace("read_only:", "readonly:"))
    assert "readonly" in compose_problems(wrong)


def compose_problems(path: Path) -> str:
    """What the JSON schema of the Compose specification, which check-jsonschema has, says."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, path], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_containers_have_few_rights_and_time_to_stop(path: Path) -> None:
    text = path.read_text()
    (file,) = documents(path)
    arguments = set(re.findall(r"^ARG (\w+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    assert {"cpu", "cuda"} <= set(file["services"]) or {"web", "worker"} <= set(file["services"])
    for name, service in file["services"].items():
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in file["volumes"], volume
        if "build" not in service:
            continue
        assert (path.parent / service["build"]["context"]).resolve() == DEPLOY.parent
        assert (DEPLOY.parent / service["build"]["dockerfile"]).is_file()
        assert set(service["build"].get("args", {})) <= arguments
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        # Of workers too: they hand their models over within drain_s.
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        assert grace_s > Settings.drain_s + KILL_GRACE_S, name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "keys travel with requests, so TLS comes first"
    settings = {f"TINKEX_{field.name.upper()}" for field in fields(Settings)}
    used = set(re.findall(r"^\s+(TINKEX_\w+):", text, re.MULTILINE))
    assert used
    assert used <= settings


@pytest.fixture(scope="module")
def nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("nginx is not installed (Debian: apt install nginx-light)")
    return found


def test_the_guide_makes_the_site_of_nginx_one_for_a_single_server(tmp_path):
    site = tmp_path / "tinkex.conf"
    shutil.copy(DEPLOY / "nginx" / "tinkex.conf", site)
    guide = (DEPLOY.parent / "docs" / "guides" / "deploy.md").read_text()
    (change,) = re.findall(r"^\$ sudo (sed -i '.+') /etc/nginx/\S+$", guide, re.MULTILINE)
    subprocess.run(f"{change} {site}", shell=True, check=True)
    servers = re.findall(r"^ +server (\S+);", site.read_text(), re.MULTILINE)
    assert servers == [f"127.0.0.1:{Settings().port}"]
    assert "server_name gpu.example;" in site.read_text()


@pytest.mark.timeout(180)
def test_nginx_passes_requests_to_a_server_and_hides_its_metrics(nginx, server: Server, tmp_path):
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost "
        f"-keyout {tmp_path}/tls.key -out {tmp_path}/tls.crt",
        shell=True,
        check=True,
        capture_output=True,
    )
    port = free_port()
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
