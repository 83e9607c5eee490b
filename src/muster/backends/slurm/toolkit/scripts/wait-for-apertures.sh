#!/bin/bash
# slurmd starts once the aperture devices are there: a job that came before them would train over TCP.
set -e
cat > /usr/local/bin/wait-for-aperture-devices.sh <<'END'
#!/bin/bash
for try in {1..30}; do
  compgen -G '/dev/aperture_devices/*' > /dev/null && exit 0
  sleep 2
done
exit 1
END
chmod 0755 /usr/local/bin/wait-for-aperture-devices.sh
mkdir -p /etc/systemd/system/slurmd.service.d
cat > /etc/systemd/system/slurmd.service.d/aperture.conf <<'END'
[Service]
ExecCondition=/usr/local/bin/wait-for-aperture-devices.sh
END
systemctl daemon-reload
