{{- /* Names, labels, argument lists and parts of pods that more than one template needs. */ -}}
{{- define "baton.name" -}}
{{- if contains "baton" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* (root, component) */ -}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- /* Flags from a map: true and false are --name and --no-name. */ -}}
{{- define "baton.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ ternary "--" "--no-" $value }}{{ $name }}
{{- else if kindIs "float64" $value }}
- --{{ $name }}={{ if eq $value (floor $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.tls" -}}
- --tls-cert=/run/secrets/tls/tls.crt
- --tls-key=/run/secrets/tls/tls.key
- --tls-ca=/run/secrets/tls/ca.crt
{{- end }}

{{- define "baton.port" -}}
{{ index (dict "gateway" 50051 "prefill" 50061 "decode" 50062 "redis" 6379 "kv" 50063) . }}
{{- end }}

{{- define "baton.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* (root, component) */ -}}
{{- define "baton.spread" -}}
{{- $root := index . 0 }}{{ $component := index . 1 }}
{{- range $root.Values.topologyKeys }}
- topologyKey: {{ . | quote }}
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "baton.selector" (list $root $component) | nindent 6 }}
{{- end }}
{{- end }}

{{- /* (root): what every process of ours is told by its environment. */ -}}
{{- define "baton.environment" -}}
{{- if and .Values.otlpEndpoint (hasKey (.Values.env | default dict) "OTEL_EXPORTER_OTLP_ENDPOINT") }}
{{- fail "otlpEndpoint and env.OTEL_EXPORTER_OTLP_ENDPOINT: they are the same variable; give one of both" }}
{{- end }}
{{- with .Values.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := .Values.env }}
- name: {{ $name | quote }}
  {{- if kindIs "string" $value }}
  value: {{ $value | quote }}
  {{- else }}
  valueFrom: {{- toYaml $value | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* (component): health by gRPC's own service, over TLS, which the kubelet's gRPC probe does not speak. */ -}}
{{- define "baton.probe" -}}
exec:
  command:
    - python
    - -m
    - baton.service.net.probe
    - --tls-ca=/run/secrets/tls/ca.crt
    {{- if ne . "gateway" }}
    - --tls-cert=/run/secrets/tls/tls.crt
    - --tls-key=/run/secrets/tls/tls.key
    {{- end }}
    - 127.0.0.1:{{ include "baton.port" . }}
timeoutSeconds: 5
{{- end }}
