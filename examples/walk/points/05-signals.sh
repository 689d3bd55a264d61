start web --ca embedded --ca-dir ca --cert-dir none

title 'SIGHUP reads again what can be read again, SIGUSR1 logs the status'
shell "kill -HUP $pid_web"
logs web 'reload requested'
shell "kill -USR1 $pid_web"
logs web 'status requested by SIGUSR1'
run attache status --socket web.sock
exits 0
