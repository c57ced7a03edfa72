"""Machines of EC2, Compute Engine and Azure, made by each provider's own command."""

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

_AWS_SETTINGS = {
    "subnet": "the subnet that the machines are in (required)",
    "instance_profile": "the instance profile that may read the job's secret (required)",
    "region": "the region (us-east-1)",
    "ami": "the machine image; `resolve:ssm:PARAMETER` takes the newest",
    "efa_cards": "EFA interfaces of a machine: 0 for none, 32 for p5.48xlarge (1 with GPUs)",
    "key_name": "an SSH key of yours",
}
_GPU_AMI = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
_CPU_AMI = "resolve:ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id"
_AWS_PLACE = (
    "# Its place: tags say where node 0 is and which rank this start of machines begins with.",
    "imds=http://169.254.169.254/latest",
    'session=$(curl -sf -X PUT "$imds/api/token" -H "X-aws-ec2-metadata-token-ttl-seconds: 300")',
    'ask() { curl -sf -H "X-aws-ec2-metadata-token: $session" "$imds/meta-data/$1"; }',
    "name=$(ask tags/instance/torsh-job)",
    "first=$(ask tags/instance/torsh-first)",
    "node_rank=$((first + $(ask ami-launch-index)))",
    "master=$(ask tags/instance/torsh-master || ask local-ipv4)",
    "AWS_DEFAULT_REGION=$(ask placement/region)",
    "export AWS_DEFAULT_REGION",
    'aws secretsmanager get-secret-value --secret-id "$name-token" --query SecretString --output text > "$token"',
)


def render_aws(submission: Submission) -> list[RenderedFile]:
    """`launch-aws.sh up|down` and the `node.sh` that its machines run."""
    options = read_settings("aws", submission, _AWS_SETTINGS, "subnet", "instance_profile")
    has_gpus = submission.gpus_per_worker > 0
    cards = options.get("efa_cards", "1" if has_gpus else "0")
    if not cards.isdigit():
        raise InvalidArgument("efa_cards must be a number", efa_cards=cards)
    settings = {
        "name": submission.name,
        "count": str(submission.nodes),
        "type": options.get("instance_type", "p5.48xlarge" if has_gpus else "c7i.4xlarge"),
        "ami": options.get("ami", _GPU_AMI if has_gpus else _CPU_AMI),
        "subnet": options["subnet"],
        "profile": options["instance_profile"],
        "AWS_DEFAULT_REGION": options.get("region", "us-east-1"),
    }
    devices = [f"--device=/dev/infiniband/uverbs{card}" for card in range(int(cards))]
    body = ["export AWS_DEFAULT_REGION", "", *_start_function(options, int(cards)), ""]
    return [
        launch_script("aws", settings, body + up_or_down(_aws_up(submission), _AWS_DOWN)),
        node_file(submission, "aws", _AWS_PLACE, devices=devices),
    ]


def _start_function(options: dict[str, str], cards: int) -> list[str]:
    """A function of the script: start so many machines, whose first has that rank."""
    if cards:
        # Every card after the first is a second device of its machine.
        interfaces = [
            f'"NetworkCardIndex={card},DeviceIndex={min(card, 1)},InterfaceType=efa,Groups=$group,SubnetId=$subnet"'
            for card in range(cards)
        ]
        network = ["--network-interfaces", *interfaces]
    else:
        network = ["--subnet-id", '"$subnet"', "--security-group-ids", '"$group"']
    command = ["aws", "ec2", "run-instances", "--count", '"$1"', "--image-id", '"$ami"', "--instance-type", '"$type"']
    command += [*network, "--placement", '"GroupName=$name"', "--iam-instance-profile", '"Name=$profile"']
    command += ["--metadata-options", "HttpTokens=required,InstanceMetadataTags=enabled"]
    command += ["--user-data", '"file://$here/node.sh"', "--tag-specifications"]
    command += ['"ResourceType=instance,Tags=[{Key=torsh-job,Value=$name},{Key=torsh-first,Value=$2}$3]"']
    if is_spot(options):
        # One-time: the machine is not brought back by itself, the job is started again from its checkpoint.
        command += ["--instance-market-options", "'MarketType=spot,SpotOptions={SpotInstanceType=one-time}'"]
    if "key_name" in options:
        command += ["--key-name", options["key_name"]]
    command += ["--query", "'Instances[0].PrivateIpAddress'", "--output", "text"]
    return [
        "# start COUNT FIRST_RANK MORE_TAGS: prints the address of the first of them",
        "start() {",
        "  " + folded(command, indent="    "),
        "}",
    ]


def _aws_up(submission: Submission) -> list[str]:
    lines = [
        'vpc=$(aws ec2 describe-subnets --subnet-ids "$subnet" --query "Subnets[0].VpcId" --output text)',
        'group=$(aws ec2 create-security-group --group-name "$name" --description "training job $name" \\',
        '  --vpc-id "$vpc" --query GroupId --output text)',
        "# All traffic, but between these machines alone; EFA needs the rule for both ways.",
        'aws ec2 authorize-security-group-ingress --group-id "$group" --protocol all --source-group "$group"',
        'aws ec2 authorize-security-group-egress --group-id "$group" --protocol all --source-group "$group"',
        'aws ec2 create-placement-group --group-name "$name" --strategy cluster',
        "openssl rand -hex 32 |",
        '  aws secretsmanager create-secret --name "$name-token" --secret-string file:///dev/stdin',
        'master=$(start 1 0 "")',
        'echo "node 0: $master"',
    ]
    if submission.nodes > 1:
        lines.append('start "$((count - 1))" 1 ",{Key=torsh-master,Value=$master}"')
    return lines


_AWS_DOWN = [
    'ids=$(aws ec2 describe-instances --filters "Name=tag:torsh-job,Values=$name" \\',
    '  "Name=instance-state-name,Values=pending,running,stopping,stopped" \\',
    '  --query "Reservations[].Instances[].InstanceId" --output text)',
    'if [[ -n "$ids" ]]; then',
    "  # shellcheck disable=SC2086 # one word per machine",
    "  aws ec2 terminate-instances --instance-ids $ids",
    "  # shellcheck disable=SC2086",
    "  aws ec2 wait instance-terminated --instance-ids $ids",
    "fi",
    'aws ec2 delete-placement-group --group-name "$name"',
    'aws secretsmanager delete-secret --secret-id "$name-token" --force-delete-without-recovery',
    'group=$(aws ec2 describe-security-groups --filters "Name=group-name,Values=$name" \\',
    '  --query "SecurityGroups[0].GroupId" --output text)',
    'aws ec2 delete-security-group --group-id "$group"',
]


_AZURE_SETTINGS = {
    "vault": "the key vault that keeps the job's secret (required)",
    "identity": "resource id of the managed identity that may read it (required)",
    "location": "the region (eastus)",
    "vm_image": "the system image; it needs Docker and, with GPUs, the driver",
    "infiniband": "yes to give the containers the machine's InfiniBand devices (yes with GPUs)",
    "ssh_key": "file with your public SSH key (~/.ssh/id_ed25519.pub)",
}
_AZURE_PLACE = (
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
    options = read_settings("azure", submission, _AZURE_SETTINGS, "vault", "identity")
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
    body = ["ssh_key=${ssh_key:-$HOME/.ssh/id_ed25519.pub}", "", *up_or_down(_azure_up(options), _AZURE_DOWN)]
    return [launch_script("azure", settings, body), node_file(submission, "azure", _AZURE_PLACE, devices=devices)]


def _azure_up(options: dict[str, str]) -> list[str]:
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


_AZURE_DOWN = [
    'az group delete --name "$name" --yes',
    'az keyvault secret delete --vault-name "$vault" --name "$name-token" --output none',
]


_GCP_SETTINGS = {
    "project": "the project (required)",
    "service_account": "the account of the machines, which may read the job's secret (required)",
    "zone": "the zone (us-central1-a)",
    "network": "the network (default)",
    "vm_image": "family of the machine's system image; the default has Docker and, with GPUs, the driver",
    "vm_image_project": "where that family is",
}
_GCP_PLACE = (
    "# Its place: the launch script gave every machine its rank; names are addresses inside the network.",
    "imds=http://169.254.169.254/computeMetadata/v1",
    'ask() { curl -sf -H "Metadata-Flavor: Google" "$imds/$1"; }',
    "node_rank=$(ask instance/attributes/torsh-rank)",
    "master=$(ask instance/attributes/torsh-master)",
    "secret=$(ask instance/attributes/torsh-secret)",
    *FIELD_FUNCTION,
    "access=$(ask instance/service-accounts/default/token | field access_token)",
    "# The header goes through a descriptor: arguments are visible to every user of the machine.",
    'curl -sf -H @<(printf "Authorization: Bearer %s" "$access") \\',
    '  "https://secretmanager.googleapis.com/v1/$secret/versions/latest:access" | field data | base64 -d > "$token"',
)


def render_gcp(submission: Submission) -> list[RenderedFile]:
    """`launch-gcp.sh up|down` and the `node.sh` that its machines run."""
    options = read_settings("gcp", submission, _GCP_SETTINGS, "project", "service_account")
    has_gpus = submission.gpus_per_worker > 0
    settings = {
        "name": submission.name,
        "count": str(submission.nodes),
        "type": options.get("instance_type", "a3-highgpu-8g" if has_gpus else "c3-standard-8"),
        "project": options["project"],
        "zone": options.get("zone", "us-central1-a"),
        "network": options.get("network", "default"),
        "account": options["service_account"],
        "image_family": options.get("vm_image", "common-cu129-ubuntu-2204-nvidia-580" if has_gpus else "cos-stable"),
        "image_project": options.get("vm_image_project", "deeplearning-platform-release" if has_gpus else "cos-cloud"),
    }
    return [
        launch_script("gcp", settings, ["region=${zone%-*}", "", *up_or_down(_gcp_up(options), _GCP_DOWN)]),
        node_file(submission, "gcp", _GCP_PLACE),
    ]


def _gcp_up(options: dict[str, str]) -> list[str]:
    command = ["gcloud", "compute", "instances", "create", '"$name-$rank"', "--project", '"$project"']
    command += ["--zone", '"$zone"', "--machine-type", '"$type"', "--resource-policies", '"$name"']
    command += ["--image-family", '"$image_family"', "--image-project", '"$image_project"']
    command += ["--boot-disk-size", "200GB", "--network-interface", '"network=$network,nic-type=GVNIC"']
    command += ["--service-account", '"$account"', "--scopes", "cloud-platform", "--tags", '"$name"']
    # Machines with GPUs cannot move while they run.
    command += ["--maintenance-policy", "TERMINATE"]
    command += ["--metadata", '"torsh-rank=$rank,torsh-master=$master,torsh-secret=$secret"']
    command += ["--metadata-from-file", '"startup-script=$here/node.sh"']
    if is_spot(options):
        command += ["--provisioning-model", "SPOT", "--instance-termination-action", "DELETE"]
    return [
        'gcloud compute resource-policies create group-placement "$name" --project "$project" --region "$region" \\',
        '  --collocation collocated --vm-count "$count"',
        "# All traffic, but between these machines alone.",
        'gcloud compute firewall-rules create "$name" --project "$project" --network "$network" --allow all \\',
        '  --source-tags "$name" --target-tags "$name"',
        "openssl rand -hex 32 |",
        '  gcloud secrets create "$name-token" --project "$project" --data-file=-',
        'gcloud secrets add-iam-policy-binding "$name-token" --project "$project" \\',
        '  --member "serviceAccount:$account" --role roles/secretmanager.secretAccessor',
        'secret="projects/$project/secrets/$name-token"',
        'master="$name-0.$zone.c.$project.internal"',
        "for ((rank = 0; rank < count; rank++)); do",
        "  " + folded(command, indent="    "),
        "done",
    ]


_GCP_DOWN = [
    "for ((rank = 0; rank < count; rank++)); do",
    "  # One that was taken back is gone already.",
    '  gcloud compute instances delete "$name-$rank" --project "$project" --zone "$zone" --quiet || true',
    "done",
    'gcloud compute firewall-rules delete "$name" --project "$project" --quiet',
    'gcloud compute resource-policies delete "$name" --project "$project" --region "$region" --quiet',
    'gcloud secrets delete "$name-token" --project "$project" --quiet',
]
