"""Jobs on Kubernetes: pods that are hosts (`monarch.job.kubernetes`).

access.py     how a program reaches the cluster's API, and proves who it is
api.py        create, list and delete objects, and read a pod's log
manifests.py  what a job creates: for each host a Pod and its Secret, for each mesh a Service
job.py        KubernetesJob
"""
