{{- /* (root, role): a worker's pod, of a Deployment or of a group of LeaderWorkerSet. */ -}}
{{- define "baton.workerPod" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}
{{- $name := include "baton.name" $root }}
{{- $worker := index $root.Values.workers $role }}
{{- $port := include "baton.port" $role }}
{{- if hasKey ($worker.flags | default dict) "kv-port" }}
{{- fail (printf "workers.%s.flags.kv-port: the chart gives %s, which its policies let workers reach; leave it out" $role (include "baton.port" "kv" | trim)) }}
{{- end }}
metadata:
  labels: {{- include "baton.labels" (list $root $role) | nindent 4 }}
spec:
  automountServiceAccountToken: false
  # SIGTERM drains it: requests run on for the grace, then move, KV is pulled, and spans are flushed.
  terminationGracePeriodSeconds: {{ add $worker.drainGraceS 30 }}
  securityContext: {{- include "baton.podSecurity" 10001 | nindent 4 }}
  topologySpreadConstraints: {{- include "baton.spread" (list $root $role) | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $worker.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $root.Values.image.repository }}:{{ $worker.tag | default $root.Values.image.tag }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [python, -m, {{ $role }}_worker]
      args:
        - --model={{ $root.Values.model.path }}
        - --listen=0.0.0.0:{{ $port }}
        - --admin=0.0.0.0:9464
        - --open-admin
        - --kv-socket-dir=/kv
        - --kv-port={{ include "baton.port" "kv" }}
        - --drain-grace-s={{ $worker.drainGraceS }}
        {{- if $worker.gpu.count }}
        - --device=cuda
        {{- else }}
        {{- with include "baton.threads" (list $root $worker) | trim }}
        - {{ . }}
        {{- end }}
        {{- end }}
        {{- include "baton.tls" . | nindent 8 }}
        {{- with include "baton.flags" $worker.flags | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- with include "baton.environment" $root | trim }}
      env: {{- . | nindent 8 }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: {{ $port }}}
        - {name: admin, containerPort: 9464}
      startupProbe: {{- include "baton.probe" $role | nindent 8 }}
        periodSeconds: 5
        failureThreshold: {{ div $worker.startS 5 }}
      readinessProbe: {{- include "baton.probe" $role | nindent 8 }}
        periodSeconds: 10
      livenessProbe:
        httpGet: {path: /healthz, port: admin}
        periodSeconds: 10
        failureThreshold: 6
      resources: {{- include "baton.workerResources" $worker | nindent 8 }}
      securityContext: {{- include "baton.locked" $root | nindent 8 }}
      volumeMounts:
        - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
        - {name: kv, mountPath: /kv}
        - {name: cache, mountPath: /home/baton}
        - {name: tmp, mountPath: /tmp}
        {{- if gt ($worker.gpu.count | int) 1 }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $root.Values.model.volume }}
        - {name: model, mountPath: /model, readOnly: true}
        {{- end }}
  volumes:
    - name: tls
      secret: {secretName: {{ $name }}-{{ $role }}-tls, defaultMode: 288}
    - {name: kv, emptyDir: {}}
    - {name: tmp, emptyDir: {}}
    {{- if gt ($worker.gpu.count | int) 1 }}
    - {name: shm, emptyDir: {medium: Memory}} # NCCL's, where GPUs do not reach each other: 64 MiB without it
    {{- end }}
    - name: cache
      {{- toYaml $worker.cache | nindent 6 }}
    {{- with $root.Values.model.volume }}
    - name: model
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}

{{- /* (root, worker): threads of each of its ranks on a CPU: pods of one node do not see each other's, and would each take all
cores. A flag beats variables and files: where one of these may say it there is none. */ -}}
{{- define "baton.threads" -}}
{{- $env := (index . 0).Values.env | default dict }}{{ $worker := index . 1 }}{{ $flags := $worker.flags | default dict }}
{{- $cpu := ($worker.resources.limits | default dict).cpu | default ($worker.resources.requests | default dict).cpu | default 0 | toString }}
{{- $cores := hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu) 1000) (float64 $cpu) | ceil | int }}
{{- $ranks := mul (get $flags "tensor-parallel" | default 1) (get $flags "pipeline-parallel" | default 1) }}
{{- $here := max 1 (sub $ranks (get $flags "remote-stages" | default 0)) }}
{{- $said := or (hasKey $flags "threads") (hasKey $flags "config") (hasKey $env "BATON_THREADS") (hasKey $env "OMP_NUM_THREADS") }}
{{- if and $cores (not $said) }}
--threads={{ max 1 (div $cores $here) }}
{{- end }}
{{- end }}

{{- /* (worker): its resources; devices are limits, which count as requests too. */ -}}
{{- define "baton.workerResources" -}}
{{- $devices := dict }}
{{- if .gpu.count }}{{ $_ := set $devices .gpu.resource (.gpu.count | int) }}{{ end }}
{{- if .rdma.count }}{{ $_ := set $devices .rdma.resource (.rdma.count | int) }}{{ end }}
{{- $resources := deepCopy .resources }}
{{- if $devices }}{{ $_ := set $resources "limits" (merge $devices (.resources.limits | default dict)) }}{{ end }}
{{- toYaml $resources }}
{{- end }}
