title 'Help'
run attache --versoin
exits 2
says '--version'
shell 'attache run -h | wc -L'
exits 0
shell 'test "$(attache run -h | wc -L)" -le 80 && echo at most 80 columns'
prints 'at most 80 columns'
shell 'test "$(attache run -h | wc -l)" -lt "$(attache run --help | wc -l)" && echo -h is shorter'
prints '-h is shorter'
