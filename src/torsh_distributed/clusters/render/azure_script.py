"""Azure: a VM scale set in one placement group, which its InfiniBand needs, made by the `az` command."""

from __future__ import annotations

from torsh_distributed.clusters.render.node_script import (
    FIELD_FUNCTION,
    is_spot,
    launch_script,
    node_file,
    read_settings,
    up_or_down,
)
from torsh_distributed.clusters.render.rendered_files import RenderedFile, folded
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument

_SETTINGS = {
    "vault": "the key vault that keeps the job's secret (required)",
    "identity": "resource id of the managed identity that may read it (required)",
    "location": "the region (eastus)",
    "vm_image": "the system image; it needs Docker and, with GPUs, the driver",
    "infiniband": "yes to give the containers the machine's InfiniBand devices (yes with GPUs)",
    "ssh_key": "file with your public SSH key (~/.ssh/id_ed25519.pub)",
}
_PLACE = (
    "# Its place: machines of a scale set that was made in one go are numbered from 0, and so are their names.",
    "imds=http://169.254.169.254/metadata",
    'ask() { curl -sf -H "Metadata: true" "$imds/$1"; }',
    'machine=$(ask "instance/compute/name?api-version=2021-02-01&format=text")',
    'tags=$(ask "instance/compute/tags?api-version=2021-02-01&format=text")',
    "node_rank=${machine##*_}",
    "name=${machine%_*}",
    'master="$name"000000',
    "vault=${tags##*torsh-vault:}",
    "vault=${vault%%;*}",
    *FIELD_FUNCTION,
    'address="identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Fvault.azure.net"',
    'access=$(ask "$address" | field access_token)',
    "# The header goes through a descriptor: arguments are visible to every user of the machine.",
    'curl -sf -H @<(printf "Authorization: Bearer %s" "$access") \\',
    '  "https://$vault.vault.azure.net/secrets/$name-token?api-version=7.4" | field value > "$token"',
)


def render_azure(submission: Submission) -> list[RenderedFile]:
    """`launch-azure.sh up|down` and the `node.sh` that its machines run."""
    options = read_settings("azure", submission, _SETTINGS, "vault", "identity")
    if len(submission.name) > 9 or not submission.name.isalnum():
        raise InvalidArgument(
            "on Azure the job's name becomes the machines': at most 9 letters and digits",
            hint="for example --name train1",
            name=submission.name,
        )
    has_gpus = submission.gpus_per_worker > 0
    settings = {
        "name": submission.name,
        "count": str(submission.nodes),
        "type": options.get("instance_type", "Standard_ND96isr_H100_v5" if has_gpus else "Standard_D8s_v5"),
        "location": options.get("location", "eastus"),
        "image": options.get("vm_image", "microsoft-dsvm:ubuntu-hpc:2204:latest"),
        "vault": options["vault"],
        "identity": options["identity"],
        "ssh_key": options.get("ssh_key", ""),
    }
    has_infiniband = options.get("infiniband", "yes" if has_gpus else "no") == "yes"
    devices = ["--device=/dev/infiniband", "--cap-add=IPC_LOCK"] if has_infiniband else []
    body = ["ssh_key=${ssh_key:-$HOME/.ssh/id_ed25519.pub}", "", *up_or_down(_up(options), _DOWN)]
    return [launch_script("azure", settings, body), node_file(submission, "azure", _PLACE, devices=devices)]


def _up(options: dict[str, str]) -> list[str]:
    command = ["az", "vmss", "create", "--resource-group", '"$name"', "--name", '"$name"', "--image", '"$image"']
    command += ["--vm-sku", '"$type"', "--instance-count", '"$count"', "--computer-name-prefix", '"$name"']
    # Numbers without gaps, and one InfiniBand fabric.
    command += ["--orchestration-mode", "Uniform", "--disable-overprovision", "--single-placement-group", "true"]
    command += ["--platform-fault-domain-count", "1", "--upgrade-policy-mode", "Manual"]
    command += ["--assign-identity", '"$identity"', "--tags", '"torsh-vault=$vault"']
    command += ["--custom-data", '"$here/node.sh"', "--admin-username", "trainer"]
    command += ["--ssh-key-values", '"$ssh_key"', "--load-balancer", "''", "--public-ip-address", "''"]
    # Azure says so in advance, also when it deletes a machine for other reasons.
    command += ["--enable-terminate-notification", "true", "--terminate-notification-time", "5"]
    if is_spot(options):
        command += ["--priority", "Spot", "--eviction-policy", "Delete", "--max-price", "-1"]
    return [
        'az group create --name "$name" --location "$location"',
        "secret=$(mktemp)",
        "trap 'rm -f \"$secret\"' EXIT",
        'openssl rand -hex 32 > "$secret"',
        'az keyvault secret set --vault-name "$vault" --name "$name-token" --file "$secret" --output none',
        "# Machines of one scale set reach each other; nothing from outside reaches them.",
        folded(command, indent="  "),
    ]


_DOWN = [
    'az group delete --name "$name" --yes',
    'az keyvault secret delete --vault-name "$vault" --name "$name-token" --output none',
]
