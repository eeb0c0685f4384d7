{{- /* The beginning of all names; with the name of a tier and what Kubernetes appends a pod's name has 63 characters at most. */}}
{{- define "terrace.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-terrace" .Release.Name) (contains "terrace" .Release.Name) }}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" }}
{{- end }}


{{- /* What selects the pods of one component: (dict "root" $ "component" "edge"). */}}
{{- define "terrace.selector" -}}
app.kubernetes.io/name: terrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "terrace.labels" -}}
{{ include "terrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- /* URLs of the schedulers, as nodes read them. */}}
{{- define "terrace.schedulers" -}}
{{- $name := printf "%s-scheduler" (include "terrace.fullname" .) }}
{{- $urls := list }}
{{- if eq (int .Values.scheduler.replicas) 1 }}{{ $urls = list (printf "http://%s:8070" $name) }}
{{- else }}{{ range until (int .Values.scheduler.replicas) }}{{ $urls = append $urls (printf "http://%s-%d:8070" $name .) }}{{ end }}
{{- end }}
{{- join "," $urls }}
{{- end }}

{{- define "terrace.secret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-tokens" (include "terrace.fullname" .)) }}
{{- end }}

{{- /* A setting as an environment variable has it: whole numbers without exponent, lists with commas. */}}
{{- define "terrace.value" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{- /* Settings as environment variables: (dict "service" "edge" "settings" (list common own)). `merge` would lose 0 and false. */}}
{{- define "terrace.env" -}}
{{- $all := dict }}
{{- range .settings }}{{ range $name, $value := . }}{{ $_ := set $all $name $value }}{{ end }}{{ end }}
{{- range $name, $value := $all }}
- name: TERRACE_{{ upper $.service }}_{{ upper $name }}
  value: {{ include "terrace.value" $value | quote }}
{{- end }}
{{- end }}

{{- /* Seconds until SIGKILL: those that the service takes to finish its work, and some for its end. */}}
{{- define "terrace.grace" -}}
{{- $own := index . 0 }}{{ $common := index . 1 }}
{{- $drain := 10 }}
{{- if hasKey $own "drain_s" }}{{ $drain = $own.drain_s }}{{ else if hasKey $common "drain_s" }}{{ $drain = $common.drain_s }}{{ end }}
{{- add (ceil (float64 $drain)) 15 }}
{{- end }}

{{- /* What all pods have in common: (dict "root" $ "values" .Values.scheduler). */}}
{{- define "terrace.pod" -}}
serviceAccountName: {{ include "terrace.fullname" .root }}
automountServiceAccountToken: false
# Variables that Kubernetes makes for Services, such as TERRACE_SCHEDULER_PORT, would be taken for settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "terrace.grace" (list .values.settings .root.Values.settings) }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}

{{- /* What all containers have in common: (dict "root" $ "values" .Values.scheduler "port" 8070 "ready" "/readyz"). Only services have a port. */}}
{{- define "terrace.container" -}}
image: {{ .values.image | default .root.Values.image | default (printf "terrace:%s" .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
{{- if .port }}
ports:
  - {name: http, containerPort: {{ .port }}, protocol: TCP}
livenessProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: {{ .ready | quote }}, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
resources: {{ toJson .values.resources }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
