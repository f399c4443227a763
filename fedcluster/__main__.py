from fedcluster.cli import main

main()
