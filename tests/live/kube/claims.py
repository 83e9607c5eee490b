"""Resource claims as Kueue 0.19.2 accounts for them: refused, left alone or turned into quota by its Configuration."""

from fractions import Fraction

from quota import NoFit


def claimed(api, workload, configuration, gates):
    """Pod set -> what each of its pods asks for by claims (workload_controller.go, pkg/dra/claims.go).

    Raises:
        NoFit: with the message of the condition QuotaReserved; the Workload is not even queued.
    """
    rows = [
        (index, pod_set["name"], number, claim["resourceClaimTemplateName"])
        for index, pod_set in enumerate(workload["spec"]["podSets"])
        for number, claim in enumerate(pod_set["template"]["spec"].get("resourceClaims") or [])
    ]
    if rows and not gates["KueueDRAIntegration"]:
        if gates["KueueDRARejectWorkloadsWhenDRADisabled"]:
            words = "Workload uses DRA resources but the KueueDRAIntegration feature gate is not enabled"
            raise NoFit("Inadmissible", words)
        return {}
    mappings = (configuration.get("resources") or {}).get("deviceClassMappings") or []
    names = {device: row["name"] for row in mappings for device in row["deviceClassNames"]}
    namespace, found = workload["metadata"]["namespace"], {}
    for index, role, number, template in rows:
        field = f"spec.podSets[{index}].template.spec.resourceClaims[{number}]"
        claim = api.get(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates/{template}")
        if claim is None:
            lost = f'resourceclaimtemplates.resource.k8s.io "{template}" not found'
            words = f"failed to get claim spec for ResourceClaimTemplate {template} in podset {role}: {lost}"
            raise NoFit("Inadmissible", f"{field}: Internal error: {words}")
        for request in claim["spec"]["spec"]["devices"]["requests"]:
            device, count = request["exactly"]["deviceClassName"], request["exactly"]["count"]
            if device not in names:
                words = f"DeviceClass {device} is not mapped in DRA configuration for podset {role}"
                raise NoFit("Inadmissible", f'{field}.resourceClaimTemplateName: Not found: "{words}"')
            asked = found.setdefault(role, {})
            asked[names[device]] = asked.get(names[device], Fraction(0)) + count
    return found
