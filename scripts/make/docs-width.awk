# Fails for prose of more than 100 columns. Tables, code blocks and lines that are one long link are exempt.
BEGIN { width = 100 }
FNR == 1 { code = 0 }
/^ *```/ { code = !code; next }
code || /^ *\|/ || length($0) <= width { next }
{
  longest = 0
  for (i = 1; i <= NF; i++) if (length($i) > longest) longest = length($i)
  if (longest > width - 20) next
  printf "%s:%d: %d columns, at most %d\n", FILENAME, FNR, length($0), width
  wrong = 1
}
END { exit wrong }
