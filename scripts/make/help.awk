# Prints the Makefile's targets from their ## comments, under the headings of its ##@ lines. Lines fit 100 columns.
BEGIN { FS = ":.*## "; width = 100 }
/^##@ / { printf "\n%s\n", substr($0, 5) }
/^[a-z0-9-]+:.*## / {
  line = sprintf("  make %-16s", $1)
  count = split($2, words, " ")
  for (i = 1; i <= count; i++) {
    if (length(line) + 1 + length(words[i]) > width) {
      print line
      line = sprintf("%23s", "")
    }
    line = line " " words[i]
  }
  print line
}
END { print "\nSettings and their defaults are in .env.example. Set one for a single command: make loadtest USERS=8" }
