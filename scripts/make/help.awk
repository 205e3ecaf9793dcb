# Prints the Makefile's targets from their ## comments, under the headings of its ##@ lines.
BEGIN { FS = ":.*## " }
/^##@ / { printf "\n%s\n", substr($0, 5) }
/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $1, $2 }
END { print "\nSettings and their defaults are in .env.example. Set one for a single command: make loadtest USERS=8" }
