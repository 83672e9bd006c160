"""Every file in deploy/ against the real thing: commands that exist, variables that are read, schemas, shells."""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from autotune import settings
from autotune.cli.main import app
from autotune.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SCRIPTS = [*sorted(DEPLOY.rglob("*.sh")), *sorted(DEPLOY.rglob("*.sbatch")), ROOT / ".ci/run"]
TEXTS = [
    path
    for path in [*sorted(DEPLOY.rglob("*")), ROOT / "docs/deploy.md"]
    if path.is_file() and path.suffix not in {".py", ".pyc"}
]
IMAGES = {"autotune", "autotune-worker"}
KUBERNETES_VERSIONS = ("1.29", kubernetes_validate.latest_version())

Document = dict[str, Any]


def compose() -> Document:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def objects() -> list[Document]:
    return [item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text())]


def pods() -> dict[str, Document]:
    """Name to pod spec of everything that runs pods."""
    return {
        f"{item['kind']} {item['metadata']['name']}": item["spec"]["template"]["spec"]
        for item in objects()
        if "template" in item.get("spec", {})
    }


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def unit(path: Path) -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


# -- commands ---------------------------------------------------------------------------------------------


def text_commands(text: str) -> Iterator[list[str]]:
    """`autotune VERB ...` in shell and prose: up to the end of the line, a closing backtick or a quote, a redirect."""
    joined = text.replace("\\\n", " ")
    for found in re.finditer(
        r"(?:^|[\s/`;])(?:autotune|run --rm \w+) ((?:worker|serve|beat|db|keys|cluster|nodes)\b[^`\n;|#)]*)", joined
    ):
        line = re.sub(r"\"?\$\{[^}]*\}\"?|\"?\$\w+\"?", "VALUE", found[1])
        yield shlex.split(line.rstrip("'. ").split("  ")[0].removesuffix(","))


def structured_commands() -> Iterator[list[str]]:
    for path in UNITS:
        program, *arguments = shlex.split(unit(path)["Service"]["ExecStart"])
        assert Path(program).name == "autotune"
        yield arguments
    for service in compose()["services"].values():
        if service["image"] in IMAGES:
            yield service["command"]
    for pod in pods().values():
        yield from (each["args"] for each in containers(pod) if each["image"] in IMAGES)


def refusal(arguments: list[str]) -> str | None:
    """Why the real command line refuses these arguments, or None. Runs nothing."""
    command: Any = typer.main.get_command(app)
    name = "autotune"
    while hasattr(command, "commands"):
        if not arguments or arguments[0] not in command.commands:
            return f"{name}: no command {arguments[:1]}"
        name, command, arguments = arguments[0], command.commands[arguments[0]], arguments[1:]
    try:
        command.make_context(name, list(arguments))
    except typer.BadParameter.__bases__[0] as error:
        return f"{name}: {error}"
    return None


COMMANDS = sorted(
    {tuple(words) for words in structured_commands()}
    | {tuple(words) for path in TEXTS for words in text_commands(path.read_text())}
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_exists_with_its_options(words: tuple[str, ...]) -> None:
    assert refusal(list(words)) is None


def test_all_parts_of_a_fleet_are_started_by_each_way_to_deploy() -> None:
    def parts(commands: list[list[str]]) -> set[str]:
        return {words[2] if words[0] == "worker" else words[0] for words in commands} - {"db"}

    everything = {"serve", "beat", "tuner", "node"}
    by_unit = [shlex.split(unit(path)["Service"]["ExecStart"])[1:] for path in UNITS]
    by_compose = [service["command"] for service in compose()["services"].values() if service["image"] in IMAGES]
    by_pod = [each["args"] for pod in pods().values() for each in containers(pod) if each["image"] in IMAGES]
    assert parts(by_unit) == parts(by_compose) == parts(by_pod) == everything


@pytest.mark.parametrize(
    "words", [["worker", "--rolle", "node"], ["worker", "--role", "boss"], ["server"], ["serve", "--port", "x"]]
)
def test_a_command_that_does_not_exist_would_be_found(words: list[str]) -> None:
    assert refusal(words) is not None


# -- variables --------------------------------------------------------------------------------------------

VARIABLES = {value for name, value in vars(settings).items() if name.endswith("_VARIABLE")}
VARIABLES |= {name + settings.FILE for name in settings.SECRET_VARIABLES}
FOLDERS = {"XDG_DATA_HOME", "XDG_STATE_HOME"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_variable_is_one_of_the_settings(path: Path) -> None:
    assert set(re.findall(r"\bAUTOTUNE_[A-Z_]+\b", path.read_text())) <= VARIABLES


def env_example() -> dict[str, str]:
    lines = (DEPLOY / "env.example").read_text().splitlines()
    return dict(re.fullmatch(r"#?([A-Z_]+)=(\S*)", line).groups() for line in lines if re.match(r"#?[A-Z_]+=", line))  # type: ignore[union-attr,misc]


def test_the_example_names_every_variable_and_is_read_as_it_says() -> None:
    values = env_example()
    assert set(values) == VARIABLES | FOLDERS
    secrets = {name: values[name] for name in settings.SECRET_VARIABLES}
    elsewhere = {settings.COMMANDS_VARIABLE, *(name for name in values if name.endswith(settings.FILE))}
    read = read_settings({name: value for name, value in values.items() if name not in elsewhere})
    assert (read.database_url, read.broker_url) == (secrets["AUTOTUNE_DB"], secrets["AUTOTUNE_BROKER"])
    assert str(read.log_dir) == values["AUTOTUNE_LOG_DIR"]
    assert read.server == values["AUTOTUNE_SERVER"]
    assert str(read_settings({"XDG_DATA_HOME": values["XDG_DATA_HOME"]}).database_url).endswith(
        "/var/lib/autotune/autotune.db"
    )


# -- compose ----------------------------------------------------------------------------------------------

# The keys of a service in the Compose specification that we use.
SERVICE_KEYS = """
    build cap_drop command cpu_shares depends_on deploy environment healthcheck image ipc mem_limit network_mode
    networks pids_limit ports profiles pull_policy read_only restart secrets security_opt shm_size stop_grace_period
    tmpfs ulimits user volumes
"""


def test_compose_is_whole() -> None:
    file = compose()
    assert {key for key in file if not key.startswith("x-")} == {
        "name", "networks", "secrets", "services", "volumes",
    }  # fmt: skip
    for name, service in file["services"].items():
        assert set(service) <= set(SERVICE_KEYS.split()), name
        assert set(service.get("depends_on", {})) <= set(file["services"])
        named = {volume.split(":")[0] for volume in service.get("volumes", [])}
        files = {name for name in named if name.startswith("./")}
        assert all((DEPLOY / name).is_file() for name in files)
        assert named - files <= set(file["volumes"])
        assert set(service.get("secrets", [])) <= set(file["secrets"])
        assert set(service.get("networks", [])) <= set(file["networks"])
        if "build" in service:
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            assert service["build"]["target"] in docker_stages()


def test_compose_asks_for_what_its_example_names() -> None:
    example = (DEPLOY / "compose.env.example").read_text()
    named = set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))
    assert set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", (DEPLOY / "compose.yaml").read_text())) == named


@pytest.mark.parametrize("name", compose()["services"])
def test_a_container_may_little_and_is_limited(name: str) -> None:
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert service["mem_limit"]
    # Only what measures is on the host's network.
    assert (name == "worker") == (service.get("network_mode") == "host")
    assert (name == "worker") != bool(service.get("networks"))


def test_compose_gives_each_part_its_own_secrets() -> None:
    services = compose()["services"]
    secret = {name: set(service["secrets"]) for name, service in services.items()}
    control = {"database-url", "broker-url"}
    assert secret["worker"] == {"node-database-url", "node-broker-url"}
    assert all(secret[name] == control for name in ("api", "tuner", "beat", "migrate", "grant"))
    for service in services.values():
        for variable, value in service.get("environment", {}).items():
            assert variable == "POSTGRES_INITDB_ARGS" or variable.endswith("_FILE")
            if variable.endswith("_FILE"):
                assert Path(value).name in service["secrets"]


def test_compose_opens_nothing_to_the_world_by_default() -> None:
    ports = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith(("127.0.0.1:", "${BIND_ADDRESS:-127.0.0.1}:")) for port in ports)


# -- secrets ----------------------------------------------------------------------------------------------


def test_the_secrets_that_are_made_are_those_that_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    words = ["sh", DEPLOY / "secrets.sh", folder]
    environment = {"PATH": "/usr/bin:/bin", "NODE_DATABASE": "db.example.org:5432", "BROKER_SCHEME": "rediss"}
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=60)
    made = {path.name: path.read_text().strip() for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {f"secrets/{name}" for name in made} == {each["file"] for each in compose()["secrets"].values()}
    generated = [name.rpartition("=")[2] for each in kustomization()["secretGenerator"] for name in each["files"]]
    assert {f"secrets/{name}" for name in made} == set(generated)
    passwords = [value for name, value in made.items() if name.endswith("-password")]
    assert len(set(passwords)) == 5
    assert all(len(password) == 48 for password in passwords)
    owner, node, broker = made["database-owner-password"], made["database-node-password"], made["broker-password"]
    assert made["database-url"] == f"postgresql://autotune:{owner}@postgres:5432/autotune"
    assert made["node-database-url"] == f"postgresql://autotune_node:{node}@db.example.org:5432/autotune"
    assert made["broker-url"] == f"rediss://autotune:{broker}@redis:6379/0"
    read = read_settings({"AUTOTUNE_DB_FILE": str(folder / "database-url")})
    assert read.database_url == made["database-url"]
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=60)
    assert {path.name: path.read_text().strip() for path in folder.iterdir()} == made


def test_no_superuser_is_what_autotune_uses() -> None:
    """The images make a superuser of POSTGRES_USER, by default postgres: no URL of ours may name it."""
    text = "".join(path.read_text() for path in TEXTS)
    assert "POSTGRES_USER" not in text
    assert "postgresql://postgres" not in text
    roles = set(re.findall(r"postgresql://(\w+):", text))
    script = (DEPLOY / "postgres/roles.sql").read_text()
    assert roles == set(re.findall(r"^ALTER ROLE (\w+) LOGIN NOSUPERUSER ", script, re.MULTILINE))


# -- images -----------------------------------------------------------------------------------------------


def kustomization() -> Document:
    return yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())


def test_every_image_is_named_by_its_digest() -> None:
    """A tag can be put behind another image by whoever has the registry: none is used anywhere."""
    for service in compose()["services"].values():
        if service["image"] in IMAGES:  # built here, from an image by its digest
            assert service["pull_policy"] == "build"
            assert service["build"]["args"]["PYTHON_DIGEST"].startswith("${PYTHON_DIGEST:?")
        else:
            assert re.fullmatch(r"\w+@\$\{[A-Z]+_DIGEST:\?[^}]+\}", service["image"])
    pinned = kustomization()["images"]
    used = {each["image"] for pod in pods().values() for each in containers(pod)}
    assert used == {each["name"] for each in pinned}
    for each in pinned:
        assert set(each) <= {"name", "newName", "digest"}
        assert each["digest"].startswith("sha256:")
    bases = re.findall(r"^FROM (\S+)", (DEPLOY / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert [base for base in bases if base not in docker_stages()] == ["python@${PYTHON_DIGEST}"]


# -- docker -----------------------------------------------------------------------------------------------


def docker_stages() -> list[str]:
    return re.findall(r"^FROM .* AS (\w+)$", (DEPLOY / "docker/Dockerfile").read_text(), re.MULTILINE)


def test_the_image_has_every_package_and_nothing_hidden_from_it() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    copied = {word for words in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in words.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= copied
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    extras = re.search(r"pip install --no-cache-dir '\.\[(.*)\]'", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])


def test_torch_is_in_the_workers_image_only() -> None:
    control, worker = (DEPLOY / "docker/Dockerfile").read_text().split("FROM control AS worker")
    assert '"torch"' not in control
    program = re.search(r"python -c '(.*?)'\)", worker, re.DOTALL)
    assert program is not None
    words = [sys.executable, "-c", program[1].replace("\\\n", "")]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.startswith("torch>=")


# -- kubernetes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("item", objects(), ids=lambda item: f"{item['kind']} {item['metadata']['name']}")
def test_an_object_is_what_kubernetes_takes(item: Document, version: str) -> None:
    kubernetes_validate.validate(item, version, strict=True)
    assert item["kind"] == "Namespace" or item["metadata"]["namespace"] in of_kind("Namespace")


def test_everything_is_applied() -> None:
    listed = kustomization()["resources"]
    assert set(listed) == {f"kubernetes/{path.name}" for path in MANIFESTS}


def test_kustomize_takes_it(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return  # the checks around are made everywhere
    for name in ("kustomization.yaml", "kubernetes", "postgres", "redis"):
        (shutil.copytree if (DEPLOY / name).is_dir() else shutil.copy)(DEPLOY / name, tmp_path / name)
    words = ["sh", DEPLOY / "secrets.sh", tmp_path / "secrets"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    done = subprocess.run([kubectl, "kustomize", tmp_path], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    made = list(yaml.safe_load_all(done.stdout))
    there = {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in made}
    for each in made:
        pod = each.get("spec", {}).get("template", {}).get("spec", {})
        for volume in pod.get("volumes", []):
            for kind, named in (("Secret", "secret"), ("ConfigMap", "configMap")):
                if named in volume:
                    name = volume[named].get("secretName") or volume[named]["name"]
                    assert (kind, each["metadata"]["namespace"], name) in there


def of_kind(kind: str) -> dict[str, Document]:
    return {item["metadata"]["name"]: item for item in objects() if item["kind"] == kind}


@pytest.mark.parametrize("name", pods())
def test_a_pod_refers_to_what_exists_and_may_little(name: str) -> None:
    pod = pods()[name]
    assert pod["serviceAccountName"] in of_kind("ServiceAccount")
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    claims = {
        claim["metadata"]["name"]
        for item in of_kind("StatefulSet").values()
        for claim in item["spec"].get("volumeClaimTemplates", [])
    }
    for container in containers(pod):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes | claims
        named = {variable["name"] for variable in container.get("env", [])}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))) <= named
        # Secrets come as files, of which each part gets its own.
        assert not any("secretKeyRef" in variable.get("valueFrom", {}) for variable in container.get("env", []))
        assert not {"AUTOTUNE_DB", "AUTOTUNE_BROKER", "POSTGRES_PASSWORD"} & named


def test_only_workers_are_where_more_than_the_least_is_allowed() -> None:
    level = {
        name: each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for name, each in of_kind("Namespace").items()
    }
    assert level == {"autotune": "restricted", "autotune-nodes": "privileged"}
    there = [each for each in objects() if each["metadata"].get("namespace") == "autotune-nodes"]
    assert {each["kind"] for each in there} == {"DaemonSet", "ServiceAccount", "NetworkPolicy"}
    on_host = {name for name, pod in pods().items() if pod.get("hostNetwork")}
    assert on_host == {"DaemonSet worker"}


def test_nobody_talks_to_anybody_but_as_it_is_said() -> None:
    policies = [each for each in objects() if each["kind"] == "NetworkPolicy"]
    silent = {
        each["metadata"]["namespace"]
        for each in policies
        if each["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    }
    assert silent == set(of_kind("Namespace"))
    spec = {each["metadata"]["name"]: each["spec"] for each in policies}
    for name, port in (("api", 8765), ("postgres", 5432), ("redis", 6379)):
        assert [rule["ports"] for rule in spec[name]["ingress"]] == [[{"port": port}]]
    labels = [
        item["spec"]["template"]["metadata"]["labels"] for item in objects() if "template" in item.get("spec", {})
    ]
    for name, each in spec.items():
        wanted = each["podSelector"].get("matchLabels", {})
        assert any(wanted.items() <= found.items() for found in labels), name
    metadata = ipaddress.ip_address("169.254.169.254")
    for rule in spec["alerts"]["egress"]:
        for target in rule["to"]:
            assert any(metadata in ipaddress.ip_network(each) for each in target["ipBlock"]["except"])


def test_selectors_select_their_pods() -> None:
    labels = [
        item["spec"]["template"]["metadata"]["labels"] for item in objects() if "template" in item.get("spec", {})
    ]
    for item in objects():
        selector = item.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= found.items() for found in labels), item["metadata"]["name"]


def test_an_api_without_database_is_not_ready_but_is_not_restarted() -> None:
    container = pods()["Deployment api"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"  # which asks no database
    assert container["startupProbe"]["httpGet"]["path"] == "/livez"
    assert str(container["ports"][0]["containerPort"]) in container["args"]


# -- systemd ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_ends_its_ranks_and_comes_back(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "always"
    assert 0 < int(service["TimeoutStopSec"]) <= 60
    assert service["EnvironmentFile"] == "/etc/autotune/autotune.env"
    assert {"NoNewPrivileges", "ProtectSystem", "ProtectHome", "MemoryMax", "TasksMax"} <= set(service)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_gets_its_secrets_as_files_of_its_own(path: Path) -> None:
    given = re.findall(r"^LoadCredential=([\w-]+):/etc/autotune/([\w-]+)$", path.read_text(), re.MULTILINE)
    kind = "node-" if "worker" in path.name else ""
    assert given == [("database-url", f"{kind}database-url"), ("broker-url", f"{kind}broker-url")]
    assert unit(path)["Service"]["Environment"].split() == [
        "AUTOTUNE_DB_FILE=%d/database-url", "AUTOTUNE_BROKER_FILE=%d/broker-url",
    ]  # fmt: skip


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_exposed_little(path: Path, tmp_path: Path) -> None:
    """By systemd's own measure, of 0 to 10: what a service that is taken over could do to the machine."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return  # what it counts is also asserted above, where it matters
    shutil.copy(path, tmp_path)
    words = [analyze, "security", "--offline=true", "--no-pager", str(tmp_path / path.name)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    exposure = re.search(r"Overall exposure level for \S+ ([0-9.]+) ", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    assert float(exposure[1]) < 2.5


def test_a_rank_killed_for_memory_does_not_stop_its_worker() -> None:
    assert unit(DEPLOY / "systemd/autotune-worker@.service")["Service"]["OOMPolicy"] == "continue"


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return  # the checks above are made everywhere
    for path in UNITS:
        installed = path.read_text().replace("/opt/autotune/.venv/bin/autotune", "/bin/true")
        (tmp_path / path.name).write_text(installed)
    words = [analyze, "verify", *(str(tmp_path / path.name) for path in UNITS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0


# -- shell ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound(path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for words in (["bash", "-n", path], [shellcheck, "--shell=bash", path]):
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_slurm_starts_one_worker_a_node() -> None:
    text = (DEPLOY / "slurm/worker.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == "B:TERM@60"
    assert "AUTOTUNE_DB_FILE" in text
    # The shell that gets the signal has become srun, which passes it on.
    assert "\nexec srun " in text
