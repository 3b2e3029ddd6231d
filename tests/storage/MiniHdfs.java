import java.io.File;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** An HDFS with one NameNode and DataNodes in this process. Prints its URL, and ends when its standard input ends. */
public class MiniHdfs {
    public static void main(String[] args) throws Exception {
        Configuration conf = new Configuration();
        conf.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, new File(args[0]).getAbsolutePath());
        conf.setBoolean("dfs.namenode.edits.asynclogging", false);
        conf.setBoolean("dfs.permissions.enabled", false);
        MiniDFSCluster cluster = new MiniDFSCluster.Builder(conf).numDataNodes(Integer.parseInt(args[1])).build();
        cluster.waitActive();
        System.out.println(cluster.getFileSystem().getUri());
        while (System.in.read() >= 0) { }
        Runtime.getRuntime().halt(0);
    }
}
