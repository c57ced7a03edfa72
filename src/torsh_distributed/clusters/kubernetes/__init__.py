"""Jobs on Kubernetes: `pod_template` and `job_kinds` make the objects, `kubernetes_engine` hands them to an API server.

A node of the job is a pod that runs `torsh run`. `cluster_access` reads a kubeconfig or the pod's own account,
`api_server` asks it, both by the package kubernetes; rendering needs neither.
"""
