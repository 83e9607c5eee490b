{{/* What files/modes.json has for the chosen way of buying nodes; with a reservation, its nodes are asked for. */}}
{{- define "muster.mode" -}}
{{- $mode := index (.Files.Get "files/modes.json" | fromJson) .Values.mode -}}
{{- if and .Values.reservation $mode.reserved -}}
{{- $name := base (first (splitList "/reservationBlocks/" .Values.reservation)) -}}
{{- $_ := set $mode.nodeSelector "cloud.google.com/reservation-name" $name -}}
{{- end -}}
{{- $mode | toJson -}}
{{- end -}}

{{/* Seconds after which a supervisor gives its nodes back: "0" is never. Queued nodes go when their allocation ends. */}}
{{- define "muster.leaveAfter" -}}
{{- if eq .Values.mode "flex_start_queued" -}}
{{- $asked := int .Values.maxRunDurationSeconds -}}
{{- max (div $asked 2) (sub $asked (ternary 1800 600 (ge $asked 604800))) -}}
{{- else -}}
{{- ternary "603000" "0" (eq .Values.mode "flex_start") -}}
{{- end -}}
{{- end -}}

{{/* The objects of files/objects.json, as `muster submit` sends them, with the values in place of their marks. */}}
{{- define "muster.objects" -}}
{{- $mode := include "muster.mode" . | fromJson -}}
{{- $text := .Files.Get "files/objects.json" -}}
{{- $marks := dict "@run@" .Values.runId "gs://@home@" (default "" .Values.home) "@image@" .Values.image -}}
{{- $_ := set $marks "@queue@" (default $mode.queue .Values.queue) -}}
{{- $_ := set $marks "@account@" .Values.serviceAccount -}}
{{- $_ := set $marks "@pool@" .Values.supervisorPool -}}
{{- $_ := set $marks "@hf@" .Values.huggingFaceSecret -}}
{{- $_ := set $marks "@namespace@" .Release.Namespace -}}
{{- $_ := set $marks "@prefix@" .Values.networkPrefix -}}
{{- $_ := set $marks "@priority@" .Values.supervisorPriority -}}
{{- $_ := set $marks "@leave-after@" (include "muster.leaveAfter" .) -}}
{{- $_ := set $marks "@at-most@" $mode.atMost -}}
{{- range $mark, $value := $marks -}}
{{- $text = $text | replace $mark ($value | toString | toJson | trimPrefix "\"" | trimSuffix "\"") -}}
{{- end -}}
{{- $text -}}
{{- end -}}
